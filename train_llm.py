r"""Train a language model on every GPU of one or more machines: a real run, on llm/ and training/.

On any machine, offline, a small GPT that learns the text of Python's standard library:
  python train_llm.py
Pre-train GPT-2 from fresh weights (several machines: with the options of multinode.py):
  OMP_NUM_THREADS=1 torchrun --standalone --nnodes 1 --nproc-per-node gpu train_llm.py \
  --experiment-name gpt2-openwebtext-A100 --dataset-name Skylion007/openwebtext \
  --model-name openai-community/gpt2 --batch-size 64
Fine-tune: the same with
  --experiment-name gpt-neo-imdb-A100 \
  --model-name EleutherAI/gpt-neo-1.3B --dataset-name stanfordnlp/imdb --init pretrained

A name is one of the Hugging Face hub, or local. A model: a folder, or a config.json. A dataset: a
text file, JSON lines or parquet with a column of text, or a folder of such files.
"""

import hashlib
import math
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm.check import text_config
from llm.data import TokenDataset, all_load_datasets
from llm.model import (
    DROPOUT,
    NO_TARGET,
    cross_entropy,
    describe,
    flops_per_token,
    load_model,
    longest,
    width,
)
from plumbing.agree import Refused, all_exit_if
from plumbing.streams import print_whole_lines
from training import options
from training.job import all_patiently, explain
from training.memory import exit_out_of_memory
from training.metrics import all_start_wandb
from training.optimizer import adamw
from training.sampler import StepSampler
from training.snapshots import Snapshots
from training.trainer import Trainer


class LanguageModelTrainer(Trainer):
    """What is particular to a language model: its loss, its evaluation, how others load it."""

    def __init__(self, model, tokenizer, train_data, held_out, optimizer, device, args, digest):
        self.tokenizer = tokenizer
        self.held_out = held_out
        self.vocab_size = text_config(model.config).vocab_size  # the model has more, for speed
        self.flops_per_token = flops_per_token(model, args.seq_length)
        self.tokens_in_sample = args.seq_length
        self.loss = cross_entropy
        with torch.device("meta"):  # a model without weights: it is lent them when it is exported
            self.exported = AutoModelForCausalLM.from_config(model.config)
        self.exported.generation_config = model.generation_config
        if dist.get_rank() == 0:
            self._print_model_and_data(train_data.dataset, args)
        pretrained = args.init == "pretrained"
        weights = (self._fingerprint(model), args.model_name) if pretrained else "fresh"
        identity = {
            "data": (digest, args.dataset_name),  # of a pair only the first is compared
            "sequence length": args.seq_length,
            "weights to start from": weights,
            **describe(model.config),
        }
        options = ("experiment-name", "resume")
        snapshots = Snapshots(args.folder, options, "snapshots/step-{0:08d}.pt")
        super().__init__(model, train_data, optimizer, snapshots, device, args, identity)

    def _print_model_and_data(self, train_set, args):
        count = sum(parameter.numel() for parameter in self.exported.parameters())
        flops = f"{self.flops_per_token:.3g}" if self.flops_per_token else "unknown"
        print(
            f"Model: {args.model_name} | Parameters: {count:,} | Weights: {args.init}"
            f" | Vocabulary: {self.vocab_size} | FLOPs per token: {flops}\n"
            f"Memory: {16 * count / 2**30:.2f} GiB a process for weights, gradients and optimizer"
            f" | Matrix products: {args.dtype} | Compiled: {'yes' if args.compile else 'no'}\n"
            f"Data: {args.dataset_name} | Tokens: {len(train_set) * args.seq_length:,}"
            f" in {len(train_set):,} sequences of {args.seq_length},"
            f" and {len(self.held_out):,} held out"
        )

    def _another_run(self, snapshot):
        identity = snapshot.get("identity", {})
        if "tokens" in snapshot:  # of an older version
            data, _, length = snapshot["tokens"].partition(", in sequences of ")
            identity = {"data": (data, "other text"), "sequence length": int(length)}
        # Dropout may become another: then it is told.
        identity = {name: identity[name] for name in identity if not DROPOUT.search(name)}
        return super()._another_run(snapshot | {"identity": identity})

    def _compile(self):
        super()._compile()
        self.loss = torch.compile(cross_entropy, dynamic=False, options={"use_fast_math": True})

    def _run_batch(self, model, batch, targets_in_step):
        source, targets = batch
        source = source.to(self.device, non_blocking=self.train_data.pin_memory)
        targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
        scale = torch.full((), 1 / targets_in_step, device=self.device)
        # Matrix products in bfloat16, the loss and sums of gradients in float32, as the weights.
        bfloat16 = self.args.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(input_ids=source, use_cache=False).logits
        # The gradient is to be of the loss of the step, and so is what is returned.
        loss, gradient = self.loss(logits.detach(), targets, self.vocab_size, scale)
        if torch.is_grad_enabled():
            logits.backward(gradient)
        return loss * scale

    def _targets_in_step(self, step):
        return self.sampler.size(step) * self.args.seq_length

    def _largest_batch(self, batch_size):
        return self.train_data.dataset.__getitems__([0] * batch_size)

    def _evaluate(self):
        """Return the loss on all held-out sequences, each of which counts once, on any rank."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        held_out = prepare_evaluation(self.held_out, self.args.batch_size, self.device)
        with torch.no_grad():
            for source, targets in held_out:
                # Without DDP around it: nothing is to be sent. 1: here losses are summed up.
                sums[0] += self._run_batch(self.model.module, (source, targets), 1)
                sums[1] += (targets != NO_TARGET).sum()
                stop, _ = self._agree()
                if stop:
                    return None
        dist.all_reduce(sums)
        loss = float(sums[0] / sums[1])
        perplexity = math.exp(min(loss, 700))  # e to the 710 is too much for a float
        self.log.log(
            self.steps_run,
            f"Validation loss: {loss:.4f} | Perplexity: {perplexity:.2f}",
            {"validation/loss": loss, "validation/perplexity": perplexity},
        )
        return loss

    def _without_padding(self, weights):
        """The weights without the rows that were added for speed."""
        shapes = {name: tensor.shape for name, tensor in self.exported.state_dict().items()}
        return {name: weights[name][tuple(map(slice, shapes[name]))] for name in shapes}

    def _fingerprint(self, model):
        """What weights are known by on any machine: a sum of bits, as integers, has no rounding."""
        weights = self._without_padding(model.state_dict()).values()
        sums = [each.float().view(torch.int32).sum(dtype=torch.int64).item() for each in weights]
        return hashlib.sha256(str(sums).encode()).hexdigest()

    def _export(self, weights, path):
        """Write model and tokenizer in transformers' own format, which from_pretrained loads."""
        self.exported.load_state_dict(self._without_padding(weights), assign=True)
        self.exported.tie_weights()
        self.exported.save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def load_train_objs(args):
    tokenizer, model = load_model(args)  # load your tokenizer and your model
    if args.lr is None:  # GPT-3's rate for GPT-2's width, the less the wider; less to fine-tune
        args.lr = 5e-5 if args.init == "pretrained" else 6e-4 * 768 / width(model.config)
    return tokenizer, model, adamw(model, args.lr, args.weight_decay, betas=(0.9, 0.95))


def prepare_dataloader(dataset, args, device):
    batch_size, together = args.batch_size, args.batch_size * dist.get_world_size()
    return DataLoader(
        dataset,
        collate_fn=tuple,  # TokenDataset hands out whole batches
        pin_memory=device.type not in ("cpu", "mps"),  # copies to a GPU need not be waited for
        batch_sampler=StepSampler(
            len(dataset), batch_size, args.global_batch_size or together, args.seed
        ),
    )


def prepare_evaluation(dataset, batch_size, device):
    """This rank's share, in batches of one shape, equally many on each rank (-1: no sequence)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    indices = torch.arange(len(dataset))
    indices = F.pad(indices, (0, -len(dataset) % (batch_size * world_size)), value=-1)
    batches = indices[rank::world_size].view(-1, batch_size).tolist()
    pin_memory = device.type not in ("cpu", "mps")
    return DataLoader(dataset, collate_fn=tuple, pin_memory=pin_memory, batch_sampler=batches)


def sample(folder: Path, held_out: TokenDataset, device: torch.device, seed: int):
    """Print what the model in `folder`, loaded as anybody would, adds to a text it has not seen."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    inputs, _ = held_out.__getitems__([0])
    start = inputs[:, : max(1, held_out.seq_length // 8)].to(device)
    torch.manual_seed(seed)
    length = min(start.shape[1] + 256, longest(model.config) or math.inf)
    tokens = model.generate(start, max_length=length, do_sample=True, temperature=0.7)
    given, added = tokens[0].split([start.shape[1], tokens.shape[1] - start.shape[1]])
    print(f"A sample of {folder}, after {tokenizer.decode(given)!r}:\n{tokenizer.decode(added)}")


def parse_args():
    parser = options.make_parser(__doc__)
    option = parser.add_argument
    option("--experiment-name", default="default", help="a folder in --save-dir (default)")
    option("--save-dir", default="outputs", help="for experiments and tokenised data (outputs)")
    option("--dataset-name", default="stdlib", help="of the hub, or local (stdlib: of Python)")
    option("--dataset-subset", help="of a dataset of the hub that has several")
    option("--text-column", help="the column with the text (text, or the only one with a text)")
    option("--model-name", default="byte-gpt", help="of the hub, or local (byte-gpt: a small GPT)")
    option("--tokenizer-name", help="of the hub, a folder, or bytes (that of the model)")
    option("--init", choices=("fresh", "pretrained"), default="fresh", help="weights (fresh)")
    option("--seq-length", type=int, help="tokens in a sequence (1024, or what the model takes)")
    return options.parse(parser, complete)


def complete(args):
    """Fill in what follows from other options; raise a ValueError for what is wrong."""
    name = args.experiment_name
    if name in ("", "..") or name != Path(name).name:
        raise Refused(f"experiment-name: give the name of a folder, not {name!r}")
    args.folder = str(Path(args.save_dir) / name)
    if args.seq_length is not None and args.seq_length < 1:
        raise Refused(f"seq-length: at least 1, not {args.seq_length}")
    if not args.dataset_name:
        raise Refused("dataset-name: give a name, not ''")
    if args.tokenizer_name is None:
        model = Path(args.model_name)
        args.tokenizer_name = str(model.parent) if model.is_file() else args.model_name
        if args.model_name == "byte-gpt":
            args.tokenizer_name = "bytes"


def build_trainer(args) -> LanguageModelTrainer:
    """Everything from the process group to the Trainer, which a run needs before its first step."""
    paths = ("save_dir", "folder", "dataset_name", "model_name", "tokenizer_name")
    device = options.all_start(args, paths)
    tokenizer, model, optimizer = all_patiently(
        "model-name", args.model_name, load_train_objs, args
    )
    train_set, held_out, digest = all_load_datasets(args, tokenizer)
    train_data = prepare_dataloader(train_set, args, device)
    return LanguageModelTrainer(
        model, tokenizer, train_data, held_out, optimizer, device, args, digest
    )


@record  # puts the traceback of a failure into torchrun's report
def main(args):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the first step there is nothing to save
    print_whole_lines()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    try:
        trainer = build_trainer(args)
        all_start_wandb(args, trainer.snapshots.folder, trainer.wandb_id)
        stop, problem = trainer.train()
    except torch.OutOfMemoryError as error:
        exit_out_of_memory(error, args)  # and never returns
    folder, held_out, device = trainer.snapshots.folder, trainer.held_out, trainer.device
    del trainer  # DDP has to go before the group that it talks through
    all_exit_if(problem)
    if not stop and dist.get_rank() == 0:
        try:
            sample(folder / "final", held_out, device, args.seed)
        except Exception as error:  # the model is safe, this is a treat
            print(f"There is no sample: {explain(error)}")
    dist.destroy_process_group()
    sys.exit(128 + stop if stop else 0)  # as a shell says that a signal ended a process


if __name__ == "__main__":
    main(parse_args())
