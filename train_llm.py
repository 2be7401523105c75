"""Train a language model on every GPU of one or more machines: what a real run adds to the Trainer.

On any machine, offline, a small GPT that learns the text of Python's standard library:
  python train_llm.py
Pre-train GPT-2 from fresh weights (several machines: with the options of multinode.py):
  OMP_NUM_THREADS=1 torchrun --standalone --nnodes 1 --nproc-per-node gpu train_llm.py
  --experiment-name gpt2-openwebtext-A100 --dataset-name Skylion007/openwebtext
  --model-name openai-community/gpt2 --batch-size 64
Fine-tune: the same with
  --experiment-name gpt-neo-imdb-A100
  --model-name EleutherAI/gpt-neo-1.3B --dataset-name stanfordnlp/imdb --init pretrained

A name is one of the Hugging Face hub, or local. A model: a folder, or a config.json. A dataset: a
text file, JSON lines or parquet with a column of text, or a folder of such files.
"""

import argparse
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
import uuid
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

LAUNCHER = os.getppid()  # asked before the imports that take seconds: it may end meanwhile

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it later, and then it would keep the group alive
import torch.nn.functional as F
import transformers
from filelock import FileLock, Timeout
from huggingface_hub.utils import logging as hub_logging
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # save, and leave
NO_TARGET = -100  # a target that no loss is computed for
PEAK_TFLOPS = {  # of dense bfloat16 matrix products, from the vendors' datasheets
    "B200": 2250,
    "MI300X": 1307,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165,
}


def count_gpus() -> int:
    """How many GPUs can train together on this machine. (Apple's MPS has no backend for that.)"""
    return 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()


def end_with_launcher():
    """End this process once its parent is gone: a torchrun that is killed leaves its processes."""
    while os.getppid() == LAUNCHER:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def ddp_setup(timeout: int = 600) -> torch.device:
    """Join the process group that torchrun describes and return this process's own device.

    A rank that has waited for another for `timeout` seconds fails, and with it the job.
    """
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # each line in one write
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    store = None
    if not any(name in os.environ for name in names):  # started by python: a job of one process
        os.environ.update(zip(names, ("0", "1", "0", "1", "localhost", "0"), strict=True))
        store = dist.HashStore()  # nobody else has to find it
    missing = " ".join(name for name in names if name not in os.environ)
    if missing:
        command = f"torchrun --standalone --nproc_per_node=gpu {sys.argv[0]}"
        print(f"ERROR: {missing} not set. Start with: {command} (no GPU: auto)", file=sys.stderr)
        sys.exit(2)
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names[:4])
    if dist.is_torchelastic_launched():
        threading.Thread(target=end_with_launcher, daemon=True).start()
    if local_world_size == world_size:
        # On the CPU they talk over the loopback interface, which no other machine can reach.
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    device = torch.device("cpu")
    if 0 < count_gpus() < local_world_size:
        time.sleep(60 * local_rank)  # local rank 0 tells it, then torchrun ends those who wait
        numbers = f"{local_world_size} processes, but {count_gpus()} GPUs"
        print(f"ERROR: {numbers} on {socket.gethostname()}: start one per GPU", file=sys.stderr)
        sys.exit(2)
    if count_gpus() > 0:
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)  # or every process would open GPU 0 as well
    backend = dist.get_default_backend_for_device(device)  # NCCL for CUDA and ROCm
    dist.init_process_group(
        # What lies in main memory goes through gloo, so that to agree is not to wait for the GPU.
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}",
        timeout=timedelta(seconds=timeout),
        store=store,
        **({"rank": rank, "world_size": world_size} if store else {}),
        device_id=None if device.type == "cpu" else device,
    )
    where = f"Host: {socket.gethostname()} | Pid: {os.getpid()} | Device: {device}"
    print(f"Rank: {rank} | World size: {world_size} | Local rank: {local_rank} | {where}")
    return device


def exit_on(problem: str | None):
    """If any rank has a problem, end all with exit status 2; rank 0 tells it, once for the job."""
    if not dist.is_initialized():
        ddp_setup()
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    problem = next(filter(None, problems), None)
    if problem is None:
        return
    if dist.get_rank() == 0:
        print(f"ERROR: {problem}", file=sys.stderr)
    dist.barrier()  # as soon as one process ends, torchrun ends the others
    dist.destroy_process_group()
    sys.exit(2)


def exit_on_difference(args, may_differ: tuple[str, ...]):
    """What was typed on different machines has to agree, or the ranks would train apart."""
    typed = [None] * dist.get_world_size()
    dist.all_gather_object(typed, vars(args))
    different = [key for key in vars(args) if any(each[key] != typed[0][key] for each in typed)]
    different = [key.replace("_", "-") for key in different if key not in may_differ]
    exit_on(f"{', '.join(different)}: not the same on all machines" if different else None)


def explain(error: BaseException) -> str:
    """The beginning of what an error says, and its kind."""
    return f"{textwrap.shorten(str(error), 240, placeholder=' …')} ({type(error).__name__})"


def patiently(option, name, work, *args):
    """Return `work(*args)` once all ranks are done with theirs, or end the job if one fails.

    It may take hours on one rank (a download, a big dataset), and no collective would wait for so
    long. So the ranks ask each other once a second, while a thread does the work. `option` and
    `name` are what the line of an error begins with.
    """
    future = Future()

    def do():
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()  # it does not keep a process that has to end
    while True:
        done = bool(wait([future], timeout=1).done)
        error = future.exception() if done else None
        counts = torch.tensor([not done, error is not None], dtype=int)
        dist.all_reduce(counts)
        busy, failed = counts.tolist()
        if failed or not busy:
            break
    exit_on(f"{option} {name}: {explain(error)}" if error else None)
    return future.result()


def files_of(path: Path, saved: Path) -> list[Path]:
    """The file `path`, or all files in the folder `path` but hidden ones and those in `saved`."""
    if path.is_file():
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    files = [file for file in files if saved.resolve() not in file.resolve().parents]
    return [file for file in files if "/." not in f"/{file.relative_to(path)}"]


def read_documents(name: str, subset: str | None, files: list[Path]):
    """Yield the texts of the dataset `name`, one after the other: a file or a row is a text."""
    if name == "stdlib":
        files = sorted(Path(os.__file__).parent.glob("*.py"))
    formats = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    kinds = {formats[file.suffix] for file in files if file.suffix in formats}
    if files and not kinds:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            if "\0" in text:
                raise ValueError(f"{file} is not a text")
            yield text
        return
    from datasets import load_dataset  # it takes a second, which a run with a cache need not spend

    if kinds:
        kind = max(kinds)  # beside parquet, JSON is about the data
        names = [str(file) for file in files if formats.get(file.suffix) == kind]
        rows = load_dataset(kind, data_files=names, split="train", streaming=True)
    else:
        rows = load_dataset(name, subset, split="train")
    column = None
    for row in rows:
        texts = [key for key, value in row.items() if isinstance(value, str)]
        if column is None and texts:
            column = "text" if "text" in row else texts[0]
        if column and row[column] is not None:
            yield row[column]
    if column is None:
        raise ValueError("no column is text")


def cut_documents(documents, size=2**18):
    """Cut long documents at ends of lines: yield (piece, whether it ends its document)."""
    for text in documents:
        begin = 0
        while len(text) - begin > size:
            end = text.rfind("\n", begin, begin + size) + 1 or begin + size
            yield text[begin:end], False
            begin = end
        yield text[begin:], True


def prepare_tokens(args, tokenizer, folder: Path):
    """Tokenise the dataset into `folder`, unless that was done: once for all runs and processes.

    tokens.bin holds all documents, each with an end-of-text token after it. tokens.json says what
    it should hold, and is written last: a tokens.bin that was cut off is made again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # two jobs may start at the same time
        if load_tokens(folder):
            return
        (folder / "tokens.json").unlink(missing_ok=True)
        files = files_of(Path(args.dataset_name), Path(args.save_dir))
        documents = read_documents(args.dataset_name, args.dataset_subset, files)
        pieces = cut_documents(documents)
        dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
        count, digest = 0, hashlib.sha256()
        hide = None if dist.get_rank() == 0 else True
        with open(folder / "tokens.bin", "wb") as file, tqdm(unit=" tokens", disable=hide) as bar:
            while batch := list(itertools.islice(pieces, 128)):
                texts, ends = zip(*batch, strict=True)
                encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
                for ids, end in zip(encoded, ends, strict=True):
                    tokens = np.array([*ids, tokenizer.eos_token_id] if end else ids, dtype)
                    file.write(tokens.tobytes())
                    digest.update(tokens.tobytes())
                    count += len(tokens)
                    bar.update(len(tokens))
            file.flush()
            os.fsync(file.fileno())
        about = {"tokens": count, "dtype": dtype.name, "sha256": digest.hexdigest()}
        (folder / "tokens.json.tmp").write_text(json.dumps(about))
        os.replace(folder / "tokens.json.tmp", folder / "tokens.json")
        print(f"Tokenised {args.dataset_name}: {count:,} tokens in {folder}")


def load_tokens(folder: Path) -> dict | None:
    """What tokens.json says of the tokens in `folder`, or None if these are not whole."""
    try:
        about = json.loads((folder / "tokens.json").read_text())
        size = about["tokens"] * np.dtype(about["dtype"]).itemsize
        return about if (folder / "tokens.bin").stat().st_size == size else None
    except (OSError, ValueError, KeyError):
        return None


class TokenDataset(Dataset):
    """Some of the sequences of `seq_length` tokens in a file of tokens, as inputs and targets.

    The target of a token is the next one, so a sequence needs one token more than it has inputs.
    """

    def __init__(self, path: Path, dtype: str, seq_length: int, sequences: torch.Tensor):
        self.path, self.dtype = path, dtype
        self.seq_length = seq_length
        self.sequences = sequences

    def __len__(self):
        return len(self.sequences)

    def __getitems__(self, indices):
        """Inputs and targets, each (batch, seq_length) int64. Index -1 has nothing to predict."""
        tokens = np.memmap(self.path, self.dtype, mode="r")  # reads only what is asked for
        starts = self.sequences[indices].mul(self.seq_length).tolist()
        rows = np.stack([tokens[start : start + self.seq_length + 1] for start in starts])
        rows = torch.from_numpy(rows.astype(np.int64))
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        targets[torch.tensor(indices) < 0] = NO_TARGET
        return inputs, targets


def cache_folder(args, tokenizer) -> Path:
    """Where the tokens of this dataset lie, under a name that changes when they would."""
    key = [args.dataset_name, args.dataset_subset]
    key += [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id]
    key += [sys.version] if args.dataset_name == "stdlib" else []
    for file in files_of(Path(args.dataset_name), Path(args.save_dir)):
        key += [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return Path(args.save_dir) / f"tokens-{digest[:16]}"


def load_datasets(args, tokenizer) -> tuple[TokenDataset, TokenDataset, str]:
    """The sequences to train on, those held out, and the sha256 of all tokens."""
    folder = cache_folder(args, tokenizer)
    # One process on each machine, since each machine may have a disk of its own.
    work = prepare_tokens if dist.get_node_local_rank() == 0 else lambda *_: None
    patiently("dataset-name", args.dataset_name, work, args, tokenizer, folder)
    about = load_tokens(folder) or {"tokens": 0, "sha256": None}
    problem, count = None, (about["tokens"] - 1) // args.seq_length
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, about["sha256"])
    if len(set(digests)) > 1:
        problem = f"dataset-name: {args.dataset_name} is not the same on all machines"
    elif count < 2:
        tokens = f"{args.dataset_name} has {about['tokens']} tokens"
        problem = f"seq-length: {tokens}, too few for two sequences of {args.seq_length}"
    exit_on(problem)
    # One sequence in twenty is held out, at most 1024: the same ones in all runs, for any seed.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    size = min(max(count // 20, 1), 1024)
    held_out, train = (
        TokenDataset(folder / "tokens.bin", about["dtype"], args.seq_length, part.sort().values)
        for part in (order[:size], order[size:])
    )
    return train, held_out, about["sha256"]


class StepSampler(Sampler):
    """Which sequences are in which step: a function of seed, step and global batch size alone.

    Yields the batches of this rank from step `first_step` on, without end. A step has
    `global_batch_size` sequences, the last one of an epoch has those that remain. Then some batches
    are not full, and -1 stands for no sequence, so that all batches have one shape.
    """

    def __init__(self, length: int, batch_size: int, global_batch_size: int, seed: int):
        self.length = length
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.first_step = 0
        self.order = (None, None)

    @property
    def steps_per_epoch(self):
        return math.ceil(self.length / self.global_batch_size)

    def size(self, step):
        """How many sequences are in `step`, on all ranks together."""
        begin = step % self.steps_per_epoch * self.global_batch_size
        return min(self.global_batch_size, self.length - begin)

    def accumulation(self, step):
        """How many batches each rank makes in `step`: one gradient is accumulated over them."""
        return math.ceil(self.size(step) / (self.batch_size * dist.get_world_size()))

    def sequences(self, step):
        """The indices of the sequences of `step`, on all ranks together."""
        epoch, step = divmod(step, self.steps_per_epoch)
        if self.order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.order = epoch, torch.randperm(self.length, generator=generator)
        return self.order[1][step * self.global_batch_size :][: self.global_batch_size]

    def __iter__(self):
        for step in itertools.count(self.first_step):
            mine = self.sequences(step)[dist.get_rank() :: dist.get_world_size()]
            missing = self.accumulation(step) * self.batch_size - len(mine)
            yield from F.pad(mine, (0, missing), value=-1).view(-1, self.batch_size).tolist()


def flops_per_token(model, seq_length: int) -> float:
    """Floating-point operations of a training step for one token: 6 N + 12 L H Q T.

    N are the parameters that take part in matrix products, so not those that are only looked up;
    L the layers, H the heads of size Q, T the sequence length. From appendix B of PaLM
    (Chowdhery et al. 2022, arXiv:2204.02311). Recomputation and causal masks do not change it.
    """
    output = model.get_output_embeddings().weight
    looked_up = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    count = sum(parameter.numel() for parameter in model.parameters())
    count -= sum(weight.numel() for weight in looked_up if weight is not output)
    count -= (len(output) - model.config.vocab_size) * output.shape[1]  # columns added for speed
    config = model.config
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    width = config.num_attention_heads * head_size
    return 6 * count + 12 * config.num_hidden_layers * width * seq_length


def peak_flops(device: torch.device) -> float | None:
    """The FLOP/s that the device's vendor states, or None for a device that is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return next((1e12 * peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


def memory_used(device: torch.device) -> int:
    """The most memory, in bytes, that this process has used: on its GPU if it has one."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.accelerator.max_memory_allocated(device)


def plot(folder: Path):
    """Draw the losses in metrics.jsonl, also those of the runs before, into loss.png."""
    from matplotlib.figure import Figure  # it takes a second, and is needed at the end only

    curves = {"train/loss": {}, "validation/loss": {}}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):  # a line that was cut off when a run was killed
            metrics = json.loads(line)
            step = metrics["global_step"]
            for name in curves.keys() & metrics.keys():
                # A run that went back to a snapshot replaces what came after it.
                while curves[name] and next(reversed(curves[name])) >= step:
                    curves[name].popitem()
                curves[name][step] = metrics[name]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(curve.keys(), curve.values(), label=name, marker=".")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)


class StopSignals:
    """While it is entered, `number` is the first signal to stop that came, or 0.

    A signal that comes more than 3 seconds later ends the process at once. A thread sees to it,
    since a trainer that hangs in a collective runs no Python. What comes within that time counts
    as the same signal: a scheduler may send it to all processes, torchrun hands it on, and
    end_with_launcher adds one if torchrun itself has ended.
    """

    def __enter__(self):
        self.number = 0
        self.before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer)  # every signal writes its number there
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        return self

    def _listen(self):
        first = math.inf
        while number := os.read(self.reader, 1)[0]:
            if number in SIGNALS and time.monotonic() - first > 3:
                os._exit(128 + number)
            if number in SIGNALS and self.number == 0:
                self.number, first = number, time.monotonic()

    def __exit__(self, *error):
        signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        os.write(self.writer, b"\0")  # the thread ends
        self.thread.join()
        os.close(self.reader)
        os.close(self.writer)


class Stopwatch:
    """Adds up the seconds that the steps spend on data, on saving and on communication.

    A GPU works through a queue, and the host does not wait for it: what happens on the GPU is
    marked by events in that queue, whose times are read when the queue has been waited for anyway.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self):
        self.begin = time.perf_counter()
        self.seconds = {"data": 0.0, "communication": 0.0, "save": 0.0}
        self.ready, self.events = None, []

    def add(self, name, begin):
        self.seconds[name] += time.perf_counter() - begin

    def mark(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def gradients_arrived(self):
        """Communication is what the step waits for once its last gradient is ready to be sent."""
        self.events.append((self.ready, self.mark()))

    def read(self):
        """Return (seconds since the reset, fraction of them for each part), and reset."""
        for begin, end in self.events:
            on_cpu = self.device.type == "cpu"
            self.seconds["communication"] += (
                end - begin if on_cpu else begin.elapsed_time(end) / 1e3
            )
        seconds = time.perf_counter() - self.begin
        parts = {name: part / seconds for name, part in self.seconds.items()}
        parts = {"compute": 1 - sum(parts.values()), **parts}
        self.reset()
        return seconds, parts


def sum_gradients(
    stopwatch: Stopwatch, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """How DDP sends a bucket of gradients: it sums. (By itself it would take the mean.)"""
    if bucket.is_last():
        stopwatch.ready = stopwatch.mark()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def cross_entropy(logits, targets, vocab_size: int, scale: torch.Tensor):
    """The sum of the cross-entropy over all targets, in nats, and the gradient of scale * that sum.

    logits is (batch, seq_length, columns): those from vocab_size on count as if they were not
    there. targets is (batch, seq_length), where NO_TARGET has no loss. The gradient is as logits.

    The gradient is softmax(logits) - one_hot(targets). It is written out, and not left to
    autograd, because the logits are the largest tensor of a step by far: torch.compile makes one
    kernel of this function, which reads them once and writes the gradient once.
    """
    column = torch.arange(logits.shape[-1], device=logits.device)
    is_target = column == targets.unsqueeze(-1)
    log_p = logits.float().masked_fill(column >= vocab_size, -math.inf).log_softmax(dim=-1)
    loss = -torch.where(is_target, log_p, 0.0).sum()
    gradient = (log_p.exp() - is_target.float()) * (targets != NO_TARGET).unsqueeze(-1) * scale
    return loss, gradient.to(logits.dtype)


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer,
        train_data: DataLoader,
        held_out: DataLoader,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        args: argparse.Namespace,
    ):
        self.rank = dist.get_rank()
        self.model = model.to(device)
        self.vocab_size = model.config.vocab_size  # the model has some columns more, for speed
        self.tokenizer = tokenizer
        self.train_data = train_data
        self.held_out = held_out
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.wandb_run = None
        self.wandb_id = uuid.uuid4().hex[:8]
        self.folder = Path(args.save_dir) / args.experiment_name
        self.steps_run = 0
        self.best_loss = math.inf
        self.signals, self.problem = StopSignals(), None
        self.losses, self.norms = [], []
        self.writer, self.buffers = ThreadPoolExecutor(1), {}
        self.writing = self.writer.submit(lambda: None)
        self.stopwatch = Stopwatch(device)
        self.flops_per_token = flops_per_token(self.model, args.seq_length)
        with torch.device("meta"):  # a model without weights: it is lent them when it is exported
            self.exported = AutoModelForCausalLM.from_config(model.config)
        self.exported.generation_config = model.generation_config
        self._make_optimizer_state()
        self._lock_folder()
        self._load_snapshot()
        sampler = train_data.batch_sampler
        args.global_batch_size = sampler.global_batch_size  # it may be that of the snapshot
        exit_on_remainder(args)
        self.total_steps = args.max_steps or args.num_epochs * sampler.steps_per_epoch
        self.warmup_steps = args.warmup_steps
        if self.warmup_steps is None:
            self.warmup_steps = min(self.total_steps // 10, 2000)
        if self.rank == 0:
            self._print_model_and_data()
            self.writing = self.writer.submit(self._copy_to_host, self._state())  # makes buffers
        self.loss = cross_entropy
        if args.compile:
            # Between machines gradients travel slowly. So there the model is compiled in pieces,
            # one for each bucket of gradients: the first can be sent while the next are computed.
            # On one machine the pieces cost more than that saves.
            machines = torch.tensor(int(dist.get_node_local_rank() == 0))
            dist.all_reduce(machines)
            torch._dynamo.config.optimize_ddp = machines.item() > 1
            # In place: the names of the parameters stay as they are. All batches have one shape.
            self.model.compile(dynamic=False)
            fast = {"use_fast_math": True}
            self.loss = torch.compile(cross_entropy, dynamic=False, options=fast)
        # Buffers are tables that never change: they are not sent. torch 2.13 renamed the option.
        names = ("forward_sync_buffers", "broadcast_buffers")
        constant = next(name for name in names if name in inspect.signature(DDP).parameters)
        self.model = DDP(  # gives every rank the weights of rank 0
            self.model,
            bucket_cap_mb=args.bucket_cap_mb,
            gradient_as_bucket_view=True,  # gradients are sent from where they lie
            **{constant: False},
        )
        self.model.train()  # from_pretrained hands out a model in eval mode
        self.model.register_comm_hook(self.stopwatch, sum_gradients)
        self._fit_batch_size()
        # In its first backward pass DDP adds the gradients up in another order than in all others,
        # and rounds otherwise. A resumed run has a first pass too, yet it shall end with the same
        # bits as an unbroken one. So that pass is made here, by each run, and not counted.
        self._run_batch(self.model, *train_data.dataset.__getitems__([0] * args.batch_size), 1)
        self.optimizer.zero_grad(set_to_none=False)
        if self.rank == 0:
            self._print_steps()

    def _lock_folder(self):
        """Two jobs must not write in one folder. The end of the process opens the lock again."""
        problem = None
        if self.rank == 0:
            self.lock = FileLock(self.folder / "lock")
            try:
                self.lock.acquire(timeout=10)  # the job before may be on its way out
            except Timeout:
                problem = f"experiment-name: another job is writing in {self.folder}"
        exit_on(problem)

    def _make_optimizer_state(self):
        """Take a step of nothing, so that the optimizer has its state: a snapshot goes into it."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            state["step"].zero_()

    def _fit_batch_size(self):
        """Divide the batch until it fits on all GPUs. More accumulation makes the same steps."""
        args, asked = self.args, self.args.batch_size
        while True:
            fits = torch.tensor(1)
            # To compile takes a minute, so only the first try does. The others need more memory:
            # what fits there will fit when it is compiled.
            stance = "default" if args.batch_size == asked else "force_eager"
            try:
                batch = self.train_data.dataset.__getitems__([0] * args.batch_size)
                # no_sync: another rank may not get as far as to send gradients.
                with torch.compiler.set_stance(stance), self.model.no_sync():
                    self._run_batch(self.model, *batch, 1)
            except torch.OutOfMemoryError:
                if args.batch_size == 1:
                    raise
                fits = torch.tensor(0)
            dist.all_reduce(fits, dist.ReduceOp.MIN)
            if fits:
                break
            torch._dynamo.reset()  # what was compiled for batches of that size is of no use now,
            torch.cuda.empty_cache()  # nor is the memory that was kept for them
            args.batch_size = largest_divisor(args.batch_size)
        args.fits = True
        if args.batch_size < asked:
            if self.device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats()  # of what did not fit
            self.train_data.batch_sampler.batch_size = args.batch_size
            self.held_out = prepare_evaluation(self.held_out.dataset, args, self.device)
            if self.rank == 0:
                sizes = (
                    f"--batch-size {args.batch_size} --global-batch-size {args.global_batch_size}"
                )
                print(f"WARNING: {asked} sequences do not fit on a GPU. Going on with {sizes}")

    def _print_model_and_data(self):
        args, sequences = self.args, len(self.train_data.dataset)
        count = sum(parameter.numel() for parameter in self.exported.parameters())
        print(
            f"Model: {args.model_name} | Parameters: {count:,} | Weights: {args.init}"
            f" | Vocabulary: {self.vocab_size} | FLOPs per token: {self.flops_per_token:.3g}\n"
            f"Memory: {16 * count / 2**30:.2f} GiB a process for weights, gradients and optimizer"
            f" | Matrix products: {args.dtype} | Compiled: {'yes' if args.compile else 'no'}\n"
            f"Data: {args.dataset_name} | Tokens: {sequences * args.seq_length:,} in {sequences:,}"
            f" sequences of {args.seq_length}, and {len(self.held_out.dataset):,} held out"
        )

    def _print_steps(self):
        args, processes = self.args, dist.get_world_size()
        sequences = args.global_batch_size
        accumulation = sequences // (args.batch_size * processes)
        epochs = self.total_steps / self.train_data.batch_sampler.steps_per_epoch
        print(
            f"Global batch size: {args.batch_size} (batch) x {accumulation} (accumulation)"
            f" x {processes} (processes) = {sequences} sequences"
            f" = {sequences * args.seq_length:,} tokens\n"
            f"Steps: {self.total_steps:,} ({epochs:.2f} epochs) | LR: {args.lr:.2e}"
            f" after {self.warmup_steps} steps of warm-up"
        )
        if self.steps_run >= self.total_steps:
            print(f"Step {self.steps_run} is done already, so there is nothing to train")

    def _run_batch(self, model, source, targets, targets_in_step):
        """The share of these targets in the loss of the step; backward too if gradients are on."""
        source = source.to(self.device, non_blocking=self.train_data.pin_memory)
        targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
        scale = torch.full((), 1 / targets_in_step, device=self.device)
        # Matrix products in bfloat16, the loss and sums of gradients in float32, as the weights.
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.args.dtype == "bfloat16"
        ):
            logits = model(input_ids=source, use_cache=False).logits
        loss, gradient = self.loss(logits.detach(), targets, self.vocab_size, scale)
        if torch.is_grad_enabled():
            logits.backward(gradient)
        return loss * scale

    def _run_step(self, step):
        sampler = self.train_data.batch_sampler
        # Dropout has to differ between ranks and steps, but not between two runs.
        torch.manual_seed(sampler.seed + step * dist.get_world_size() + self.rank)
        # The loss is divided by the number of targets in the step, on all ranks and in all batches.
        # So the gradient is that of one big batch, also where a step has fewer sequences.
        targets_in_step = sampler.size(step) * self.args.seq_length
        loss = torch.zeros((), device=self.device)
        for batches_left in reversed(range(sampler.accumulation(step))):
            begin = time.perf_counter()
            source, targets = next(self.batches)
            self.stopwatch.add("data", begin)
            # Only the last backward pass sends gradients: by then all of them are added up.
            with self.model.no_sync() if batches_left else nullcontext():
                loss += self._run_batch(self.model, source, targets, targets_in_step)
        self.stopwatch.gradients_arrived()
        clip_norm = self.args.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # they stay where they are sent from
        self.losses.append(loss)
        self.norms.append(norm)

    def learning_rate(self, step):
        """Rises in a line over the warm-up steps, then falls as a cosine does, to a tenth."""
        warmup_steps, total_steps = self.warmup_steps, self.total_steps
        if step < warmup_steps:
            return self.args.lr * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return self.args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def _problem_with_gradients(self):
        """What is wrong with the steps since the last report, if a gradient is NaN or infinite."""
        norms = torch.stack(self.norms).tolist()  # waits for the GPU; the same on all ranks
        for step, norm in enumerate(norms, self.steps_run - len(norms) + 1):
            if not math.isfinite(norm):
                self.writing.result()  # one may be on its way to the disk
                good = next(iter(self._snapshots()), "none")
                advice = "lower --lr or --clip-norm"
                return (
                    f"the gradient of step {step} is {norm}: {advice}. Last good snapshot: {good}"
                )
        return None

    def _report(self):
        """Print and log the steps since the last report."""
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)  # sums over the ranks: each has divided by the targets of all
        loss, norm = float(losses.mean()), float(self.norms[-1])
        seconds, parts = self.stopwatch.read()
        steps = range(self.steps_run - len(losses), self.steps_run)
        tokens = sum(map(self.train_data.batch_sampler.size, steps)) * self.args.seq_length
        speed = tokens / seconds
        peak = peak_flops(self.device)
        self.losses, self.norms = [], []
        metrics = {
            "train/loss": loss,
            "train/lr": self.learning_rate(self.steps_run - 1),
            "train/grad_norm": norm,
            "train/tokens_per_second": speed,
            "train/mfu": speed / dist.get_world_size() * self.flops_per_token / peak
            if peak
            else None,
            "train/memory_gib": memory_used(self.device) / 2**30,
            **{f"time/{name}": part for name, part in parts.items()},
        }
        mfu = f"{metrics['train/mfu']:.1%}" if peak else "unknown"
        self.bar.set_postfix_str(f"loss {loss:.4f}, {speed:,.0f} tokens/s, MFU {mfu}")
        self._log(
            f"Loss: {loss:.4f} | LR: {metrics['train/lr']:.2e} | Grad norm: {norm:.2f}"
            f" | Tokens/s: {speed:,.0f} | MFU: {mfu}"
            f" | Memory: {metrics['train/memory_gib']:.1f} GiB"
            f" | Time: {', '.join(f'{name} {part:.0%}' for name, part in parts.items())}",
            metrics,
        )

    def _evaluate(self):
        """Return the loss on all held-out sequences, each of which counts once, on any rank."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # what is in the queue is still training
        begin = time.perf_counter()
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for source, targets in self.held_out:
                # Without DDP around it: the ranks may have different numbers of batches.
                sums[0] += self._run_batch(self.model.module, source, targets, 1)
                sums[1] += (targets != NO_TARGET).sum()
        self.model.train()
        dist.all_reduce(sums)
        loss = float(sums[0] / sums[1])
        self._log(
            f"Validation loss: {loss:.4f} | Perplexity: {math.exp(min(loss, 700)):.2f}",
            {"validation/loss": loss, "validation/perplexity": math.exp(min(loss, 700))},
        )
        self.stopwatch.begin += time.perf_counter() - begin  # it is not a part of any step
        return loss

    def _log(self, line, metrics):
        metrics = {"global_step": self.steps_run, **metrics}
        if self.rank == 0:
            self.bar.write(f"Step {self.steps_run}/{self.total_steps} | {line}")
            try:
                with open(self.folder / "metrics.jsonl", "a") as file:
                    print(json.dumps({"timestamp": time.time(), **metrics}), file=file)
            except OSError as error:
                self.problem = f"cannot write in {self.folder}: {explain(error)}"
        if self.wandb_run:
            with suppress(Exception):  # training is worth more than its log
                self.wandb_run.log(metrics)

    def _snapshots(self):
        """The snapshots on this machine, newest first."""
        return sorted(self.folder.glob(f"snapshots/step-{'[0-9]' * 8}.pt"), reverse=True)

    def _state(self):
        model = self.model.module if isinstance(self.model, DDP) else self.model
        return {"model": model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _save(self, snapshot: bool, exports: list[str]):
        """Save a snapshot and models. Training waits for a copy in memory, not for the disk."""
        if self.rank != 0 or not (snapshot or exports):
            return  # all ranks have the same weights: one file, one writer
        begin = time.perf_counter()
        self.writing.result()  # the buffers are free once the last save is on the disk
        state = self._state()
        if not snapshot:
            del state["optimizer"]
        state = self._copy_to_host(state)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        state |= {
            "steps_run": self.steps_run,
            "seed": self.train_data.batch_sampler.seed,
            "global_batch_size": self.train_data.batch_sampler.global_batch_size,
            "tokens": self.args.tokens,
            "best_loss": self.best_loss,
            "wandb_id": self.wandb_id,
            "name": uuid.uuid4().hex,  # so that two of the same step are not taken for one
        }
        self.writing = self.writer.submit(self._write, state, snapshot, exports)
        self.stopwatch.add("save", begin)

    def _copy_to_host(self, value):
        """Copy the tensors in `value`, a tree of dicts, into buffers that all saves use."""
        if isinstance(value, dict):
            return {key: self._copy_to_host(item) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        key = value.data_ptr()  # tied weights are one tensor with two names: they stay one
        if key not in self.buffers:
            pin = self.device.type == "cuda"  # what is pinned is copied to at full speed
            self.buffers[key] = torch.empty_like(value, device="cpu", pin_memory=pin)
        return self.buffers[key].copy_(value, non_blocking=True)

    def _write(self, state, snapshot, exports):
        """Runs in a thread beside the training."""
        temporary = self.folder / "snapshots" / "snapshot.tmp"
        try:
            for name in exports:
                self._export(state["model"], self.folder / name)
                self.bar.write(f"Step {state['steps_run']} | Model saved at {self.folder / name}")
            if snapshot:
                path = temporary.with_name(f"step-{state['steps_run']:08}.pt")
                path.parent.mkdir(exist_ok=True)
                with open(temporary, "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())  # on the disk, before it counts as a snapshot
                os.replace(temporary, path)  # whole or not at all
                for old in [other for other in self._snapshots() if other < path][1:]:
                    old.unlink()  # the last but one is kept, in case that the last is damaged
                self.bar.write(f"Step {state['steps_run']} | Training snapshot saved at {path}")
        except Exception as error:
            while error.__context__:  # torch.save fails once more where it ends the file
                error = error.__context__
            why = f"{explain(error)}. The last snapshot stays"
            self.problem = f"cannot save in {self.folder}: {why}"
            with suppress(OSError):  # half a file would keep the disk full
                temporary.unlink()

    def _export(self, weights, path):
        """Write model and tokenizer in transformers' own format, which from_pretrained loads."""
        weights = {  # without the rows that were added for speed
            name: weights[name][tuple(map(slice, tensor.shape))]
            for name, tensor in self.exported.state_dict().items()
        }
        self.exported.load_state_dict(weights, assign=True)
        self.exported.tie_weights()
        temporary, replaced = path.with_suffix(".tmp"), path.with_suffix(".old")
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        self.exported.save_pretrained(temporary)
        self.tokenizer.save_pretrained(temporary)
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)  # so that a folder of that name is always whole
        temporary.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _load_snapshot(self):
        """Go on from the newest snapshot on any machine, or from the step that --resume names."""
        asked, paths, problem = self.args.resume, self._snapshots(), None
        if asked == "none" and paths:
            problem = f"resume: {self.folder} has snapshots: choose another --experiment-name"
        exit_on(problem)
        if asked.isdecimal():
            paths = [path for path in paths if int(path.stem[5:]) == int(asked)]
        name, unusable = None, {}
        for path in paths:
            try:  # weights_only: a file from elsewhere must not run code
                with zipfile.ZipFile(path) as file:  # torch.load checks no sums
                    if file.testzip():
                        raise zipfile.BadZipFile("a checksum in it is wrong")
                snapshot = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                self._resume(snapshot)
                name = snapshot["name"]
                break
            except Exception as error:
                unusable[path] = f"{path} cannot be used: {explain(error)}"
        # Every machine has a disk of its own: all ranks go on from the newest snapshot on any.
        found = [None] * dist.get_world_size()
        job = self.wandb_id if name else None
        dist.all_gather_object(found, (self.steps_run, name, job, list(unusable.values())))
        steps, names, jobs, lines = zip(*found, strict=True)
        lines = sorted(set(itertools.chain(*lines)))
        if lines and not any(names):
            problem = f"{lines[-1]}. Move it away, or choose another --experiment-name"
        elif asked.isdecimal() and not any(names):
            problem = f"resume: there is no snapshot of step {asked} in {self.folder}"
        elif len(set(jobs) - {None}) > 1:
            problem = f"{self.folder} is not of the same job on all machines: move the others away"
        exit_on(problem)
        sampler, source = self.train_data.batch_sampler, steps.index(max(steps))
        newest = [self.steps_run, self.best_loss, self.wandb_id]
        newest += [sampler.seed, sampler.global_batch_size]
        dist.broadcast_object_list(newest, source, device=self.device)
        self.steps_run, self.best_loss, self.wandb_id = newest[:3]
        sampler.seed, sampler.global_batch_size = newest[3:]
        if len(set(names)) > 1:
            for state in (self.model.state_dict(), *self.optimizer.state.values()):
                for tensor in state.values():
                    dist.broadcast(tensor, source)
        sampler.first_step = self.steps_run
        with suppress(FileNotFoundError):  # a save was cut off here; rank 0 may be elsewhere now
            (self.folder / "snapshots" / "snapshot.tmp").unlink()
        for path in self._snapshots():  # these shall not be taken for the newest from here on
            if path in unusable or int(path.stem[5:]) > self.steps_run:
                with suppress(FileNotFoundError):  # another rank of this machine was faster
                    path.rename(path.with_suffix(".unused"))
        if self.rank == 0:
            for line in lines:
                print(f"WARNING: {line}. Another one is used, and this one is renamed")
            if self.steps_run > 0:
                print(f"Resuming training from snapshot at Step {self.steps_run}")

    def _resume(self, snapshot):
        sampler, typed = self.train_data.batch_sampler, self.args.global_batch_size
        if snapshot["tokens"] != self.args.tokens:
            raise ValueError("it was trained on other data or with another --seq-length")
        if typed not in (None, snapshot["global_batch_size"]):
            raise ValueError(f"its --global-batch-size was {snapshot['global_batch_size']}")
        self.model.load_state_dict(snapshot["model"])
        for number, state in self.optimizer.state_dict()["state"].items():
            for key, tensor in state.items():
                tensor.copy_(snapshot["optimizer"]["state"][number][key])
        self.steps_run = snapshot["steps_run"]
        self.best_loss = snapshot["best_loss"]
        self.wandb_id = snapshot["wandb_id"]
        sampler.seed = snapshot["seed"]
        sampler.global_batch_size = snapshot["global_batch_size"]

    def _agree(self):
        """Tell all ranks of a signal or a problem here; return what any of them told."""
        told = torch.tensor([self.signals.number, self.problem is not None])
        dist.all_reduce(told, dist.ReduceOp.MAX)  # on the CPU: it does not wait for the GPU
        return told.tolist()

    def train(self) -> tuple[int, str | None]:
        """Train to the last step or until a signal; return the signal or 0, and what went wrong."""
        with self.signals:
            return self._train()

    def _train(self):
        args, stop, problem, failed, first = self.args, 0, None, False, self.steps_run
        # A bar on rank 0 only, only on a terminal (None).
        hide = None if self.rank == 0 else True
        self.bar = tqdm(total=self.total_steps, initial=self.steps_run, disable=hide, unit="step")
        self.batches = iter(self.train_data)
        self.stopwatch.reset()
        while self.steps_run < self.total_steps and not stop:
            self._run_step(self.steps_run)
            self.steps_run += 1
            self.bar.update()
            stop, failed = self._agree()
            finished = self.steps_run == self.total_steps
            report = stop or finished or self.steps_run % args.log_freq == 0
            save = stop or finished or self.steps_run % args.ckpt_freq == 0
            if report or save:
                problem = self._problem_with_gradients()
            if problem or failed:
                break
            if report:
                self._report()
            exports = ["final"] if finished else []
            if finished or (not stop and self.steps_run % args.eval_freq == 0):
                loss = self._evaluate()
                if loss < self.best_loss:
                    self.best_loss = loss
                    exports.append("best")
            self._save(save, exports)
        del self.batches  # ends the process that reads the data
        if first >= self.total_steps:  # there was nothing to do, but perhaps this was left undone
            self._save(False, ["final"])
        self.writing.result()
        self._agree()  # no rank may end, and torchrun with it, while rank 0 still writes
        self.bar.close()
        problem = problem or self.problem
        if self.rank == 0 and not problem:
            try:
                plot(self.folder)
            except Exception as error:
                print(f"There is no new loss.png: {explain(error)}")
        if self.rank == 0 and stop and not problem:
            print(f"{signal.Signals(stop).name}: saved at step {self.steps_run}, leaving")
        return stop, problem

    def start_wandb(self, args):
        """Log to Weights & Biases from here on. Without `--wandb` it is not even imported."""
        if args.wandb == "disabled" or (self.rank != 0 and args.wandb_group is None):
            return
        try:
            import wandb

            self.wandb_run = wandb.init(
                project="ddp-ladder",
                mode=args.wandb,
                config={key: str(value) for key, value in vars(args).items()},
                dir=self.folder,
                name=f"{args.experiment_name}-{self.rank}",
                id=f"{self.wandb_id}-{self.rank}",
                resume="allow",  # a job that goes on from a snapshot goes on in the same run
                group=args.wandb_group,
            )
            for metrics in ("train/*", "validation/*", "time/*"):
                self.wandb_run.define_metric(metrics, step_metric="global_step")
        except Exception as error:
            print(f"Training goes on without wandb: {error}")


def exit_on_remainder(args):
    """A step consists of whole batches, equally many on each rank."""
    together, problem = args.batch_size * dist.get_world_size(), None
    if (args.global_batch_size or together) % together:
        parts = f"{args.batch_size} in a batch x {dist.get_world_size()} processes"
        number = f"{args.global_batch_size} is not a multiple of {together} ({parts})"
        problem = f"global-batch-size: {number}: change one of them"
    exit_on(problem)


def load_tokenizer(name: str):
    """The tokenizer of that name or, for "bytes", one with a token for each byte."""
    if name != "bytes":
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    vocabulary = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def load_train_objs(args):
    torch.manual_seed(args.seed)  # the same initial weights in every run and process
    tokenizer = load_tokenizer(args.tokenizer_name)  # load your tokenizer
    if args.model_name == "byte-gpt":  # load your model
        sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 256, "vocab_size": 257}
        config = GPT2Config(**sizes, bos_token_id=256, eos_token_id=256)
    else:
        # False: code that comes with a model is not run.
        config = AutoConfig.from_pretrained(args.model_name, trust_remote_code=False)
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {args.tokenizer_name} has no end-of-text token or is slow")
    if len(tokenizer) > config.vocab_size:
        sizes = f"{len(tokenizer)} tokens, the model's vocabulary {config.vocab_size}"
        raise ValueError(f"the tokenizer {args.tokenizer_name} has {sizes}: they do not fit")
    longest = getattr(config, "max_position_embeddings", 1024)
    args.seq_length = args.seq_length or min(1024, longest)
    if args.seq_length > longest:
        raise ValueError(f"the model takes at most {longest} tokens: choose a shorter --seq-length")
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"  # the same function in one kernel
    if args.dropout is None and args.init == "fresh":
        args.dropout = 0.0  # who sees a text once cannot learn it by heart
    for name in vars(config):
        if name.endswith(("pdrop", "dropout")) and args.dropout is not None:
            setattr(config, name, args.dropout)
    if args.init == "pretrained":
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name,
            config=config,
            trust_remote_code=False,
        )
    else:
        model = AutoModelForCausalLM.from_config(config)
    model.float()
    # transformers may hand a causal mask to attention, which then computes the masked half as well.
    # What has a name of its own gets none, and then scaled_dot_product_attention is told "causal".
    special = ("sliding_window", "attention_chunk_size")
    plain = all(getattr(config, name, None) is None for name in special)
    if plain and config._attn_implementation == "sdpa":
        AttentionInterface.register("causal", sdpa_attention_forward)
        model.set_attn_implementation("causal")
    # A sum of bfloat16 and float32 is float32, so what the embeddings give decides for all layers
    # in what type their outputs are added up, and how much memory that moves.
    if args.dtype == "bfloat16":
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    # Matrix products are fast only if the number of columns can be divided by 64.
    vocab_size = config.vocab_size
    model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)
    model.config.vocab_size = vocab_size
    if args.lr is None:  # GPT-3's rate for GPT-2's width, the less the wider; less to fine-tune
        args.lr = 5e-5 if args.init == "pretrained" else 6e-4 * 768 / config.hidden_size
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},  # biases and norms have nothing to gain from it
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    return tokenizer, model, optimizer


def leave_signals_to_the_trainer(worker):
    """Let a process that reads data go on until its trainer ends it, whoever else sends signals."""
    if not hasattr(signal, "sigtimedwait"):  # macOS does not tell who sends a signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    trainer = multiprocessing.parent_process()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.set_wakeup_fd(-1)

    def obey_the_trainer():
        while trainer.is_alive():  # or it holds a killed trainer's connections open
            received = signal.sigtimedwait(SIGNALS, 1)
            if received and received.si_pid == trainer.pid:
                break
        os._exit(0)

    threading.Thread(target=obey_the_trainer, daemon=True).start()


def prepare_dataloader(dataset: Dataset, args, device: torch.device):
    default = args.batch_size * dist.get_world_size()
    sampler = StepSampler(
        len(dataset),
        args.batch_size,
        args.global_batch_size or default,
        args.seed,
    )
    return DataLoader(
        dataset,
        collate_fn=tuple,  # TokenDataset hands out whole batches
        pin_memory=device.type not in ("cpu", "mps"),  # copies to a GPU need not be waited for
        batch_sampler=sampler,
        num_workers=1,  # a process that reads ahead while the model computes
        worker_init_fn=leave_signals_to_the_trainer,
    )


def prepare_evaluation(dataset: Dataset, args, device: torch.device):
    """This rank's share of the held-out sequences, in batches of one shape (-1: no sequence)."""
    mine = torch.arange(len(dataset))[dist.get_rank() :: dist.get_world_size()]
    mine = F.pad(mine, (0, -len(mine) % args.batch_size), value=-1)
    batches = mine.view(-1, args.batch_size).tolist()
    pin_memory = device.type not in ("cpu", "mps")
    return DataLoader(dataset, collate_fn=tuple, pin_memory=pin_memory, batch_sampler=batches)


def bind_cpus():
    """Keep this process on a share of this machine's CPU cores, and so near their memory."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    here = [rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()]]

    def place(cpu):  # socket, then core: the hardware threads of a core stay together
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        return [int((folder / name).read_text()) for name in ("physical_package_id", "core_id")]

    problem = None
    try:
        cpus = sorted(os.sched_getaffinity(0), key=place)
        share = len(cpus) // len(here)
        begin = here.index(dist.get_rank()) * share
        os.sched_setaffinity(0, cpus[begin : begin + share])
        torch.set_num_threads(min(torch.get_num_threads(), share))
    except (AttributeError, OSError) as error:  # not on macOS, not with more processes than cores
        problem = f"bind-cpus: not on {socket.gethostname()}: {explain(error)}"
    exit_on(problem)


def sample(folder: Path, held_out: TokenDataset, device: torch.device, seed: int):
    """Print what the model in `folder`, loaded as anybody would, adds to a text it has not seen."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    inputs, _ = held_out.__getitems__([0])
    start = inputs[:, : max(1, held_out.seq_length // 8)].to(device)
    torch.manual_seed(seed)
    longest = getattr(model.config, "max_position_embeddings", 1024)
    length = min(start.shape[1] + 256, longest)
    tokens = model.generate(start, max_length=length, do_sample=True, temperature=0.7)
    given, added = tokens[0].split([start.shape[1], tokens.shape[1] - start.shape[1]])
    print(f"A sample of {folder}, after {tokenizer.decode(given)!r}:\n{tokenizer.decode(added)}")


def largest_divisor(number: int) -> int:
    """The largest divisor of `number` but itself."""
    return max(divisor for divisor in range(1, number) if number % divisor == 0)


def explain_out_of_memory(error, args):
    """Say what to lower when a GPU has not enough memory, and end the job."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(5 * dist.get_node_local_rank())  # one tells it, then torchrun ends those who wait
    size, together = args.batch_size, args.global_batch_size
    advice = "a shorter --seq-length or a smaller model: even one sequence does not fit"
    if args.fits and size > 1:
        sizes = f"--batch-size {largest_divisor(size)} --global-batch-size {together}"
        advice = f"{sizes} (the same steps, in more passes)"
    elif args.fits:
        advice = f"--seq-length {args.seq_length // 2}"
    what = f"{size} sequences of {args.seq_length} tokens do not fit on rank {dist.get_rank()}"
    print(f"ERROR: {what}: {explain(error)} Try {advice}", file=sys.stderr, flush=True)
    os._exit(2)  # the others wait for this process, so there is no orderly end


def parse_args():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # a mistake is told in one line
        description=__doc__,
        epilog="(Defaults in parentheses.)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = exit_on  # and not once by each rank
    option = parser.add_argument
    option("--experiment-name", default="default", help="a folder in --save-dir (default)")
    option("--save-dir", default="outputs", help="for experiments and tokenised data (outputs)")
    option("--dataset-name", default="stdlib", help="of the hub, or local (stdlib: of Python)")
    option("--dataset-subset", help="of a dataset of the hub that has several")
    option("--model-name", default="byte-gpt", help="of the hub, or local (byte-gpt: a small GPT)")
    option("--tokenizer-name", help="of the hub, a folder, or bytes (that of the model)")
    option("--init", choices=("fresh", "pretrained"), default="fresh", help="weights (fresh)")
    option("--seq-length", type=int, help="tokens in a sequence (1024, or what the model takes)")
    option("--batch-size", type=int, default=8, help="sequences in a pass of one process (8)")
    together = "sequences in a step of all processes (batch size * processes)"
    option("--global-batch-size", type=int, help=together)
    option("--num-epochs", type=int, default=1, help="how often to go through the data (1)")
    option("--max-steps", type=int, help="train so many steps, whatever --num-epochs is")
    option("--lr", type=float, help="highest learning rate (from the model's width, or 5e-5)")
    option(
        "--warmup-steps", type=int, help="of a rising learning rate (a tenth of all, up to 2000)"
    )
    option("--weight-decay", type=float, default=0.1, help="of matrices (0.1)")
    option("--clip-norm", type=float, default=1.0, help="longest gradient, 0: any (1.0)")
    option("--dropout", type=float, help="probability (0; for pretrained weights the model's own)")
    option("--seed", type=int, default=0, help="fixes initial weights, order and dropout (0)")
    option("--log-freq", type=int, default=10, help="steps from one line to the next (10)")
    option("--eval-freq", type=int, default=250, help="steps from one evaluation to the next (250)")
    option("--ckpt-freq", type=int, default=250, help="steps from one snapshot to the next (250)")
    option(
        "--resume", default="latest", help="snapshot: latest, the number of a step, none (latest)"
    )
    option("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of products")
    option("--compile", action=argparse.BooleanOptionalAction, help="with torch.compile (on a GPU)")
    option("--bucket-cap-mb", type=int, default=100, help="MiB of gradients sent at once (100)")
    option("--timeout", type=int, default=600, help="seconds to wait for another rank (600)")
    option("--bind-cpus", action="store_true", help="give each process CPU cores of its own")
    modes = ("disabled", "offline", "online")
    option("--wandb", choices=modes, default="disabled", help="offline needs no account (disabled)")
    option("--wandb-group", help="log every rank, in a group of this name (rank 0 only)")
    args = parser.parse_args()
    positive = ("seq_length", "batch_size", "global_batch_size", "num_epochs", "max_steps")
    positive += ("log_freq", "eval_freq", "ckpt_freq", "bucket_cap_mb", "timeout")
    others = ("lr", "warmup_steps", "weight_decay", "clip_norm", "dropout", "seed")
    least = dict.fromkeys(positive, 1) | dict.fromkeys(others, 0)
    for name, value in least.items():
        given = getattr(args, name)
        limit = math.inf if isinstance(given, float) else 2**31
        if given is not None and not value <= given < limit:
            parser.error(f"{name.replace('_', '-')}: at least {value}, not {given}")
    if not (args.resume in ("latest", "none") or re.fullmatch("[1-9][0-9]{0,7}", args.resume)):
        parser.error(f"resume: give latest, none or the number of a step, not {args.resume!r}")
    if args.tokenizer_name is None:
        model = Path(args.model_name)
        args.tokenizer_name = str(model.parent) if model.is_file() else args.model_name
        if args.model_name == "byte-gpt":
            args.tokenizer_name = "bytes"
    name = args.experiment_name
    if name in ("", "..") or name != Path(name).name:
        parser.error(f"experiment-name: give the name of a folder, not {name!r}")
    if not args.dataset_name:
        parser.error("dataset-name: give a name, not ''")
    try:
        folder = Path(args.save_dir) / args.experiment_name
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # better told now than at the first save
    except OSError as error:
        parser.error(f"save-dir: cannot write in {folder} ({error.strerror}): choose another")
    return args


def build_trainer(args) -> Trainer:
    """Everything from the process group to the Trainer, which a run needs before its first step."""
    device = ddp_setup(args.timeout)
    exit_on(None)  # what was typed on another machine may be wrong: then all end here
    names = ("save_dir", "dataset_name", "model_name", "tokenizer_name")  # paths of a machine
    exit_on_difference(args, may_differ=names)
    exit_on_remainder(args)
    args.fits = False  # that is to be seen
    if args.bind_cpus:
        bind_cpus()
    on_gpu = device.type == "cuda"
    args.compile = on_gpu if args.compile is None else args.compile
    if args.dtype == "auto":
        args.dtype = (
            "bfloat16"
            if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
            else "float32"
        )
    tokenizer, model, optimizer = patiently("model-name", args.model_name, load_train_objs, args)
    train_set, held_out, digest = load_datasets(args, tokenizer)
    args.tokens = f"{digest}, in sequences of {args.seq_length}"
    train_data = prepare_dataloader(train_set, args, device)
    held_out = prepare_evaluation(held_out, args, device)
    return Trainer(model, tokenizer, train_data, held_out, optimizer, device, args)


@record  # puts the traceback of a failure into torchrun's report
def main(args):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    try:
        trainer = build_trainer(args)
        trainer.start_wandb(args)
        stop, problem = trainer.train()
    except torch.OutOfMemoryError as error:
        explain_out_of_memory(error, args)
    folder, held_out, device = trainer.folder, trainer.held_out.dataset, trainer.device
    del trainer  # DDP has to go before the group that it talks through
    exit_on(problem)
    if not stop and dist.get_rank() == 0:
        try:
            sample(folder / "final", held_out, device, args.seed)
        except Exception as error:  # the model is safe, this is a treat
            print(f"There is no sample: {explain(error)}")
    dist.destroy_process_group()
    sys.exit(128 + stop if stop else 0)  # as a shell says that a signal ended a process


if __name__ == "__main__":
    main(parse_args())
