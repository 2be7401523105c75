"""Measure train_llm.py on GPT-2's architecture, side by side with bare loops, in one run.

Run:  python benchmarks/llm_speed.py                     every row, on one and on all GPUs
      python benchmarks/llm_speed.py --only nano script  some of them

Sequences of 1024 random tokens, 64 in a batch, bfloat16; a step has 4 batches or, where it says so,
one. MFU is 6 N + 12 L H Q T operations a token against the peak of the GPU, as in train_llm.py.

nano     A bare loop around a model of 40 lines of plain PyTorch, torch.compile over model and loss.
plain    A bare loop around transformers' GPT-2 as it comes, torch.compile over model and loss.
script   One process takes turns: the steps of train_llm.py with all that belongs to them (data,
         DDP, agreement, report), and a bare loop around the same compiled model and loss and the
         same optimizer. The ratio is the script's overhead. This on each GPU alone, since cards
         differ, and then the steps of the script on all of them.
medium   As script, with GPT-2 350M, 32 in a batch, on one GPU.
save     Seconds that a step waits for a snapshot, against torch.save of the same state; the speed
         of the steps while the file is written; and reading it with and without mmap.
start    Seconds from the start of the script to the end of its first step, with a cold and a warm
         compile cache.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from threading import Timer

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LENGTH, ACCUMULATION = 1024, 4
SIZES = {"gpt2": (12, 768, 12, 64), "medium": (24, 1024, 16, 32)}  # layers, width, heads, batch


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in heads]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Nano(nn.Module):
    def __init__(self, layers, width, heads, vocab_size=50304):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)


def seconds(work, *args):
    """How long `work` takes, on the device too."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    begin = time.perf_counter()
    work(*args)
    synchronize()
    return time.perf_counter() - begin


def bare_loop(kind, folder, rounds):
    """Print the speed of a plain loop. Runs in a process of its own."""
    from training.metrics import peak_flops

    layers, width, heads, batch_size = SIZES["gpt2"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if kind == "nano":
        model = Nano(layers, width, heads).to(device)
        optimizer = adamw(model)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder / "gpt2")
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = AutoModelForCausalLM.from_config(config).to(device)
        optimizer = adamw(model)

    @torch.compile
    def loss_of(source, targets):
        output = (
            model(source) if kind == "nano" else model(input_ids=source, use_cache=False).logits
        )
        return F.cross_entropy(output.flatten(0, 1), targets.flatten()) / ACCUMULATION

    rows = torch.randint(0, 50257, (2 * ACCUMULATION, batch_size, LENGTH + 1), device=device)

    def step():
        for row in rows[torch.randperm(len(rows))[:ACCUMULATION]]:
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(row[:, :-1], row[:, 1:])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def steps(number):
        for _ in range(number):
            step()

    steps(4)
    tokens = 16 * ACCUMULATION * batch_size * LENGTH
    speeds = [tokens / seconds(steps, 16) for _ in range(rounds)]
    parameters = 50257 * width + layers * (12 * width + 13) * width + 2 * width
    peak = peak_flops(device) or math.nan
    print_speed(
        f"{kind}: gpt2, 1 GPU, accumulation {ACCUMULATION}",
        speeds,
        peak / (6 * parameters + 12 * layers * width * LENGTH),
    )


def prepare(folder, words=3_000_000):
    """Write what the script is given: two configs, a tokenizer of 50257 words, a random text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(50257)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="50256")
    for size, (layers, width, heads, _) in SIZES.items():
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=LENGTH)
        config.save_pretrained(folder / size)
        tokenizer.save_pretrained(folder / size)
    numbers = torch.randint(0, 50256, (words,)).tolist()
    (folder / "text.txt").write_text(" ".join(map(str, numbers)))


def options(folder, size):
    names = ["--model-name", str(folder / size), "--dataset-name", str(folder / "text.txt")]
    return [*names, "--batch-size", str(SIZES[size][3]), "--save-dir", str(folder / "outputs")]


def run(command, **env) -> dict[tuple[str, int], float]:
    """Run a child, show what it prints, as it comes; its tokens/s by row and accumulation."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
    command, speeds = list(map(str, command)), {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        limit = Timer(500, process.kill)
        limit.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            if row := re.match(r"(\w+): .*, accumulation (\d+) +([\d,]+) tokens/s", line):
                speeds[row[1], int(row[2])] = float(row[3].replace(",", ""))
        limit.cancel()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return speeds


def child(*args, processes=1, first=0):
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    gpus = ",".join(map(str, range(first, first + processes)))
    return run([*launcher, __file__, *args], CUDA_VISIBLE_DEVICES=gpus)


def start_row(folder):
    """The first report comes right after the first step; then the script is told to leave."""
    log = folder / "outputs" / "start" / "metrics.jsonl"
    command = [sys.executable, ROOT / "train_llm.py", *options(folder, "gpt2"), "--log-freq", "1"]
    command += ["--experiment-name", "start"]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    env["CUDA_VISIBLE_DEVICES"] = "0"
    for cache in "cold", "warm":
        shutil.rmtree(log.parent, ignore_errors=True)
        begin = time.time()
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as script:
            while not (log.exists() and log.read_text().endswith("\n")) and script.poll() is None:
                time.sleep(0.1)
            script.terminate()
        first = json.loads(log.read_text().splitlines()[0])
        print(f"start    {cache} compile cache: {first['timestamp'] - begin:6.1f} s", flush=True)


class Inside:
    """A Trainer of train_llm.py, and the steps that it makes, timed in this process."""

    def __init__(self, folder, size):
        import train_llm
        from training.metrics import peak_flops

        self.batch_size = SIZES[size][3]
        sys.argv[1:] = [*options(folder, size), "--log-freq", "5", "--max-steps", "10000"]
        sys.argv += ["--experiment-name", f"{size}-{os.getppid()}"]  # on all ranks the same
        with redirect_stdout(sys.stderr):
            self.trainer = train_llm.build_trainer(train_llm.parse_args())
        self.trainer.signals.number = 0
        self.trainer.log.write = lambda line: None
        self.device, self.processes = self.trainer.device, torch.distributed.get_world_size()
        self.peak = (peak_flops(self.device) or math.nan) / self.trainer.flops_per_token

    def begin(self, accumulation):
        sampler = self.trainer.sampler
        sampler.length -= sampler.length % (self.batch_size * self.processes * ACCUMULATION)
        sampler.global_batch_size = self.batch_size * self.processes * accumulation
        sampler.first_step = self.trainer.steps_run
        self.trainer.batches = iter(self.trainer.train_data)
        self.steps(3)  # so that the first of those that count finds its data

    def steps(self, number):
        """As in Trainer.train."""
        trainer = self.trainer
        for _ in range(number):
            trainer._run_step(trainer.steps_run)
            trainer.steps_run += 1
            trainer.log.bar.update()
            trainer._agree()
            if trainer.steps_run % trainer.args.log_freq == 0:
                trainer._problem_with_gradients()
                trainer._report()

    def bare(self, number, accumulation):
        """The same model, loss and optimizer without DDP, data, agreement and report."""
        trainer = self.trainer
        model, optimizer = trainer.model.module, trainer.optimizer
        shape = (accumulation, self.batch_size, LENGTH + 1)
        rows = torch.randint(0, 50257, shape, device=self.device)
        scale = torch.full((), 1 / rows[:, :, 1:].numel(), device=self.device)
        for _ in range(number):
            for row in rows:
                with torch.autocast(self.device.type, torch.bfloat16):
                    logits = model(input_ids=row[:, :-1], use_cache=False).logits
                targets = row[:, 1:]
                _, gradient = trainer.loss(logits.detach(), targets, trainer.vocab_size, scale)
                logits.backward(gradient)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def script_rows(folder, size, rounds, number=16):
    inside = Inside(folder, size)
    for accumulation in ACCUMULATION, 1:
        inside.begin(accumulation)
        found = {"script": [], "bare": []}
        count = number * ACCUMULATION // accumulation
        tokens = count * accumulation * inside.batch_size * LENGTH
        for _ in range(rounds):
            found["script"].append(tokens / seconds(inside.steps, count))
            if inside.processes == 1:
                if not found["bare"]:
                    inside.bare(2, accumulation)
                found["bare"].append(tokens / seconds(inside.bare, count, accumulation))
        if inside.trainer.rank == 0:
            where = f"{size}, {inside.processes} GPU, accumulation {accumulation}"
            for name, speeds in found.items():
                if speeds:
                    print_speed(f"{name}: {where}", speeds, inside.peak)
            log = (inside.trainer.snapshots.folder / "metrics.jsonl").read_text().splitlines()
            parts = {key: part for key, part in json.loads(log[-1]).items() if "time/" in key}
            print(
                "        ",
                " ".join(f"{key[5:]} {part:.2%}" for key, part in parts.items()),
                end=" ",
            )
            print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        del inside.trainer.batches
    return inside


def print_speed(name, speeds, peak):
    """`peak` in tokens per second, NaN if it is not known."""
    speed = statistics.median(speeds)
    rounds = ", ".join(f"{each:,.0f}" for each in speeds)
    mfu = "" if math.isnan(peak) else f", MFU {speed / peak:.2%}"
    print(f"{name:44} {speed:9,.0f} tokens/s a GPU{mfu} ({rounds})", flush=True)


def print_efficiency(gpus, alone, together):
    """Each of `alone` has the speeds of one GPU, `together` those of a GPU in a job of all."""
    for accumulation in ACCUMULATION, 1:
        speeds = [each["script", accumulation] for each in alone]
        speed = together["script", accumulation]
        print(f"{gpus} GPUs, accumulation {accumulation}: {speed / min(speeds):.1%} of the", end="")
        print(f" slowest alone, {speed / statistics.mean(speeds):.1%} of their mean", flush=True)


def save_rows(inside):
    trainer, folder = inside.trainer, inside.trainer.snapshots.folder
    inside.begin(1)
    alone = seconds(inside.steps, 10) / 10
    first = seconds(trainer._save, True, [])
    plain, stall, busy = [], [], []

    def plain_save():
        model, optimizer = trainer.model.module.state_dict(), trainer.optimizer.state_dict()
        with open(folder / "plain.pt", "wb") as file:
            torch.save({"model": model, "optimizer": optimizer}, file)
            file.flush()
            os.fsync(file.fileno())

    for _ in range(3):
        trainer.snapshots.writing.result()
        plain.append(seconds(plain_save))
        stall.append(seconds(trainer._save, True, []))
        begin, steps = time.perf_counter(), 0
        while not trainer.snapshots.writing.done():
            seconds(inside.steps, 1)
            steps += 1
        busy.append((time.perf_counter() - begin) / max(steps, 1))
    plain, stall, busy = map(statistics.median, (plain, stall, busy))
    (path, *_) = trainer.snapshots.paths()
    size = path.stat().st_size / 2**30

    def load(mmap):
        torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    load(False)
    read = statistics.median(seconds(load, False) for _ in range(5))
    mapped = statistics.median(seconds(load, True) for _ in range(5))
    print(f"save     {size:.2f} GiB: torch.save {plain:.3f} s, a step waits {stall:.3f} s", end=" ")
    print(f"({stall / plain:.3f} of it; the first time, which makes buffers, {first:.3f} s)")
    print(f"         a step takes {alone:.3f} s, while the file is written {busy:.3f} s", end=" ")
    print(f"(speed {alone / busy:.3f})")
    print(f"         read in {read:.3f} s, with mmap in {mapped:.4f} s ({read / mapped:.0f} times)")
    del trainer.batches


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = ("nano", "plain", "script", "medium", "save", "start")
    parser.add_argument("--only", nargs="+", choices=rows, default=rows)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of each row, of which the median counts (3)"
    )
    for name in ("--child", "--size", "--folder"):  # how this program starts itself
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child in ("nano", "plain"):
        return bare_loop(args.child, Path(args.folder), args.rounds)
    if args.child:
        inside = script_rows(Path(args.folder), args.size, args.rounds)
        if args.child == "save" and inside.processes == 1:
            save_rows(inside)
        inside.trainer = None
        return torch.distributed.destroy_process_group()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        print(f"torch {torch.__version__}, {torch.cuda.device_count()} x", end=" ", flush=True)
        print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", flush=True)
        common = ["--folder", folder, "--rounds", args.rounds]
        if "start" in args.only:
            start_row(folder)
        for kind in "nano", "plain":
            if kind in args.only:
                child("--child", kind, *common)
        if "script" in args.only or "save" in args.only:
            kind = "save" if "save" in args.only else "script"
            alone = [child("--child", kind, "--size", "gpt2", *common)]
            gpus = torch.cuda.device_count()
            if "script" in args.only and gpus > 1:
                for first in range(1, gpus):
                    alone += [child("--child", "script", "--size", "gpt2", *common, first=first)]
                together = child("--child", "script", "--size", "gpt2", *common, processes=gpus)
                print_efficiency(gpus, alone, together)
        if "medium" in args.only:
            child("--child", "script", "--size", "medium", *common)


if __name__ == "__main__":
    main()
