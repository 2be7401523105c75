r"""Train a Transformer that translates, on every GPU of one or more machines.

On any machine, offline, from English to Italian, on sentences that a small grammar makes:
  python train_translation.py
On two machines, with the address of one of them:
  torchrun --nproc_per_node=2 --nnodes=2 --rdzv_id=456 --rdzv_backend=c10d \
  --rdzv_endpoint=HOST:48123 train_translation.py --batch_size 8 --model_folder weights
With the best model that there is:
  python train_translation.py --translate "The girl sees the dog."

A dataset is `default`, a file of pairs (JSON or parquet with the languages as columns, or TSV or
CSV with their names in the first line), or one of the hub, such as Helsinki-NLP/opus_books.
"""

import hashlib
import json
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

from plumbing.agree import Refused, all_exit_if, all_gather
from plumbing.devices import count_gpus
from plumbing.streams import print_whole_lines
from training import options
from training.job import all_patiently, explain
from training.memory import exit_out_of_memory
from training.metrics import all_start_wandb
from training.optimizer import adamw
from training.snapshots import Snapshots
from training.trainer import Trainer
from translation.data import EOS, PAD, SOS, LengthSampler, PairDataset, load_tokenizer
from translation.model import Transformer, beam, greedy, loss_sum
from translation.pairs import read_pairs, split
from translation.scores import scores

SIZES = {"d_model": 512, "layers": 6, "heads": 8, "d_ff": 2048, "batch_size": 32, "lr": 1e-4}
SIZES["num_epochs"] = 30
SMALL = {"d_model": 128, "layers": 2, "heads": 4, "d_ff": 512, "batch_size": 64, "lr": 2e-3}
SMALL["num_epochs"] = 8
SHOWN = 3  # sentences that an evaluation prints


class TranslationTrainer(Trainer):
    """What is particular to translation: its loss, and an evaluation that translates."""

    dynamic = True  # a batch is as long as its longest sentence

    def __init__(self, model, tokenizers, train_data, held_out, optimizer, device, args, identity):
        self.tokenizers = tokenizers
        self.held_out = held_out
        sampler = train_data.batch_sampler
        snapshots = Snapshots(
            args.folder,
            ("model-folder", "preload"),
            args.model_basename,
            number_of=lambda steps: (steps - 1) // sampler.steps_per_epoch,
            keep_all=True,
        )
        super().__init__(model, train_data, optimizer, snapshots, device, args, identity)

    def _plan_steps(self):
        super()._plan_steps()
        once = self.sampler.steps_per_epoch
        self.args.eval_freq = self.args.eval_freq or once
        self.args.ckpt_freq = self.args.ckpt_freq or once

    def _compile(self):
        from torch._inductor import config  # takes a second to import, so only where it is used

        # Its kernels are for large batches only: small ones would compile the model once more.
        config.triton.mix_order_reduction = False
        super()._compile()
        # A pass is hundreds of short kernels, and a GPU would wait for the host to start each. A
        # CUDA graph, one for each pair of lengths, starts them all at once. (Not in pieces, where
        # torch 2.11 crashes.) Batches of similar lengths have few pairs: nothing to warn of.
        config.triton.cudagraphs = not torch._dynamo.config.optimize_ddp
        config.triton.cudagraph_dynamic_shape_warn_limit = None

    def _run_batch(self, model, batch, targets_in_step):
        pin_memory = self.train_data.pin_memory
        source, inputs, labels = (each.to(self.device, non_blocking=pin_memory) for each in batch)
        smoothing = self.args.label_smoothing if torch.is_grad_enabled() else 0.0
        bfloat16 = self.args.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(source, inputs)
        loss = loss_sum(logits, labels, PAD, smoothing) / targets_in_step
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    def _targets_in_step(self, step):
        # Batches have different numbers of tokens. That of all ranks is known to each of them.
        return int(self.train_data.dataset.target_tokens[self.sampler.samples(step)].sum())

    def _largest_batch(self, batch_size):
        dataset = self.train_data.dataset
        longest = dataset.__getitems__([int(dataset.longer.argmax())])
        length = max(each.shape[1] for each in longest)
        # The source is longer, or the compiled model would be one for pairs of equal length.
        return [torch.full((batch_size, each), EOS) for each in (length + 8, length, length)]

    def _evaluate(self):
        """The loss on all pairs that are held out. And the first of them are translated, by all."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for batch in share_of_rank(self.held_out, len(self.held_out), self.args.batch_size):
                loss += self._run_batch(self.model.module, batch, 1)
                if self._agree()[0]:
                    return None
        dist.all_reduce(loss)
        loss = float(loss / self.held_out.target_tokens.sum())
        count = min(self.args.num_decode, len(self.held_out))
        mine = []
        for source, _, _ in share_of_rank(self.held_out, count, self.args.batch_size):
            mine += self._translate(source)
            if self._agree()[0]:
                return None
        ranks = all_gather(mine)
        if self.rank == 0:
            # Rank r has translated the sentences r, r + world size, …, and perhaps an empty one.
            predicted = [text for texts in zip(*ranks, strict=True) for text in texts][:count]
            self._print_scores(loss, predicted)
        return loss

    def _translate(self, source):
        tokens = greedy(
            self.model.module, source.to(self.device), SOS, EOS, longest=self.args.seq_len
        )
        return self.tokenizers[1].decode_batch(tokens.tolist())

    def _print_scores(self, loss, predicted):
        pairs = self.held_out.pairs[: len(predicted)]
        found, signature = scores(predicted, [target for _, target in pairs])
        for (source, target), text in list(zip(pairs, predicted, strict=True))[:SHOWN]:
            self.log.write(f"SOURCE: {source}\nTARGET: {target}\nPREDICTED: {text}")
        line = "BLEU {bleu:.2f} | chrF {chrf:.2f} | CER {cer:.4f} | WER {wer:.4f}".format(**found)
        metrics = {"validation/loss": loss}
        metrics |= {f"validation/{name}": value for name, value in found.items()}
        self.log.log(self.steps_run, f"Validation loss: {loss:.4f} | {line} | {signature}", metrics)

    def _export(self, weights, path):
        """Write what `--translate` needs: weights, sizes and tokenizers."""
        path.mkdir()
        torch.save(weights, path / "model.pt")
        (path / "sizes.json").write_text(json.dumps(sizes_of(self.args, self.tokenizers)))
        for name, tokenizer in zip(("source", "target"), self.tokenizers, strict=True):
            tokenizer.save(str(path / f"{name}.json"))


def sizes_of(args, tokenizers):
    """The arguments of Transformer."""
    vocab = [tokenizer.get_vocab_size() for tokenizer in tokenizers]
    sizes = {name: getattr(args, name) for name in ("d_model", "layers", "heads", "d_ff", "tied")}
    return {"source_vocab": vocab[0], "target_vocab": vocab[1], "pad_source": PAD, **sizes}


def share_of_rank(dataset, count, batch_size):
    """This rank's part of the first `count` pairs, in batches: equally many on each rank."""
    world_size = dist.get_world_size()
    indices = F.pad(torch.arange(count), (0, -count % world_size), value=-1)
    for batch in indices[dist.get_rank() :: world_size].split(batch_size):
        yield dataset.__getitems__(batch.tolist())


def load_datasets(args):
    """Both tokenizers, the pairs to train on and those held out, as tokens."""
    train, held_out = split(read_pairs(args.dataset, args.lang_src, args.lang_tgt))
    names = [args.tokenizer_file.format(language) for language in (args.lang_src, args.lang_tgt)]
    tokenizers = [
        load_tokenizer(Path(args.folder) / name, list(sentences), args.tokenizer, args.vocab_size)
        for name, sentences in zip(names, zip(*train, strict=True), strict=True)
    ]
    datasets = (PairDataset(pairs, *tokenizers, args.seq_len) for pairs in (train, held_out))
    return tokenizers, *datasets


def all_load_datasets(args):
    """The same on all ranks. On each machine one process trains the tokenizers."""
    turns = [load_datasets, lambda *_: None]
    if dist.get_node_local_rank() > 0:
        turns.reverse()  # these find the tokenizers that the first has trained
    loaded = [all_patiently("dataset", args.dataset, work, args) for work in turns]
    return loaded[0] or loaded[1]


def load_train_objs(args, tokenizers):
    torch.manual_seed(args.seed)  # the same initial weights in every run
    model = Transformer(**sizes_of(args, tokenizers), dropout=args.dropout)
    return model, adamw(model, args.lr, args.weight_decay, betas=(0.9, 0.98))


def prepare_dataloader(dataset, args, device):
    together = args.global_batch_size or args.batch_size * dist.get_world_size()
    return DataLoader(
        dataset,
        collate_fn=tuple,  # PairDataset hands out whole batches
        pin_memory=device.type not in ("cpu", "mps"),
        batch_sampler=LengthSampler(dataset.longer, args.batch_size, together, args.seed),
    )


def translate(args):
    """Print the translation of args.translate by the best model."""
    folder = Path(args.folder) / "best"
    problem = f"model-folder: there is no {folder / 'model.pt'}: train first"
    all_exit_if(None if (folder / "model.pt").exists() else problem)
    try:
        model = Transformer(**json.loads((folder / "sizes.json").read_text()))
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        files = (str(folder / f"{name}.json") for name in ("source", "target"))
        source, target = map(Tokenizer.from_file, files)
    except Exception as error:  # each of the three libraries has its own
        all_exit_if(f"model-folder: {folder} is damaged ({explain(error)}): train again")
    model.eval()
    tokens = torch.tensor([[SOS, *source.encode(args.translate).ids, EOS]])
    tokens = beam(model, tokens, SOS, EOS, args.seq_len, args.beam)  # one beam is greedy
    print(target.decode(tokens[0].tolist()))


def parse_args():
    default = {name: f"{size}; without a GPU {SMALL[name]}" for name, size in SIZES.items()}
    default |= {"dropout": "0.1", "eval_freq": "an epoch", "ckpt_freq": "an epoch"}
    parser = options.make_parser(__doc__, **default, wandb_group="exp1")
    option = parser.add_argument
    option("--translate", metavar="TEXT", help="print its translation by the best model")
    option("--beam", type=int, default=1, help="beams of --translate, 1: greedy (1)")
    option("--dataset", default="default", help="default, a file, or a name of the hub (default)")
    option("--lang-src", default="en", help="language of the source (en)")
    option("--lang-tgt", default="it", help="language of the target (it)")
    option("--tokenizer", choices=("bpe", "word"), default="bpe", help="what a token is (bpe)")
    option("--vocab-size", type=int, default=8000, help="tokens of a language, at most (8000)")
    option("--tokenizer-file", default="tokenizer_{0}.json", help="(tokenizer_{0}.json)")
    option(
        "--seq-len", "--seq-length", type=int, default=350, help="longer pairs are left out (350)"
    )
    option("--d-model", type=int, help=f"width of the model ({default['d_model']})")
    option("--layers", type=int, help=f"of the encoder, and of the decoder ({default['layers']})")
    option("--heads", type=int, help=f"of attention ({default['heads']})")
    option("--d-ff", type=int, help=f"width of the layers between ({default['d_ff']})")
    option("--tied", action="store_true", help="one matrix for the target's tokens and the output")
    option("--label-smoothing", type=float, default=0.1, help="probability of other tokens (0.1)")
    option("--model-folder", default="weights", help="where the run saves (weights)")
    option("--model-basename", default="tmodel_{0:02d}.pt", help="of the snapshot of an epoch")
    which = {"dest": "resume", "type": options.snapshot_to_resume}
    option("--preload", **which, help="as --resume; the number is that of an epoch")
    option("--num-decode", type=int, default=500, help="sentences that an evaluation translates")
    parser.set_defaults(dropout=0.1, wandb_group="exp1")
    parser.set_defaults(num_epochs=None, batch_size=None, eval_freq=None, ckpt_freq=None)
    return options.parse(parser, complete)


def complete(args):
    """Fill in what follows from other options; raise a ValueError for what is wrong."""
    small = count_gpus() == 0
    args.preset = [name for name in SIZES if getattr(args, name) is None]
    for name in args.preset:
        setattr(args, name, (SMALL if small else SIZES)[name])
    args.folder, args.seq_length = args.model_folder, args.seq_len
    for name in (
        "beam",
        "vocab_size",
        "seq_len",
        "d_model",
        "layers",
        "heads",
        "d_ff",
        "num_decode",
    ):
        if getattr(args, name) < 1:
            raise Refused(f"{name.replace('_', '-')}: at least 1, not {getattr(args, name)}")
    if args.d_model % 2 or args.d_model % args.heads:
        raise Refused(f"d-model: a multiple of 2 and of heads ({args.heads}), not {args.d_model}")
    if not 0 <= args.label_smoothing < 1:
        raise Refused(f"label-smoothing: from 0 to 1, not {args.label_smoothing}")


def build_trainer(args) -> TranslationTrainer:
    """Everything from the process group to the Trainer, which a run needs before its first step."""
    device = options.all_start(args, paths=("folder", "model_folder", "dataset"))
    # cuDNN's attention plans anew for each pair of lengths that it has not seen.
    torch.backends.cuda.enable_cudnn_sdp(False)
    tokenizers, train_set, held_out = all_load_datasets(args)
    model, optimizer = load_train_objs(args, tokenizers)
    if dist.get_rank() == 0:
        print_configuration(args, model, train_set, held_out)
    identity = {"data": (digest_of(train_set, held_out), args.dataset)}
    identity |= sizes_of(args, tokenizers)
    train_data = prepare_dataloader(train_set, args, device)
    objects = (model, tokenizers, train_data, held_out, optimizer)
    return TranslationTrainer(*objects, device, args, identity)


def digest_of(*datasets):
    tokens = [
        [
            [dataset.sources[i].tolist() for i in range(len(dataset))],
            [dataset.targets[i][1:-1].tolist() for i in range(len(dataset))],
        ]
        for dataset in datasets
    ]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def print_configuration(args, model, train_set, held_out):
    if args.preset and count_gpus() == 0:
        print(f"There is no GPU, so a small preset for: {', '.join(args.preset)}")
    print("Configuration: " + ", ".join(f"{name} {value}" for name, value in vars(args).items()))
    count = sum(parameter.numel() for parameter in model.parameters())
    too_long = train_set.too_long + held_out.too_long
    vocabularies = [
        each.num_embeddings for each in (model.source_embedding, model.target_embedding)
    ]
    print(
        f"Model: Transformer | Parameters: {count:,} | Vocabularies: {vocabularies}\n"
        f"Data: {args.dataset} | Pairs: {len(train_set):,} and {len(held_out):,} held out"
        f" | Left out: {too_long} with more than {args.seq_len} tokens"
    )


@record  # puts the traceback of a failure into torchrun's report
def main(args):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the first step there is nothing to save
    print_whole_lines()
    if getattr(args, "translate", None) is not None:
        return translate(args)
    try:
        trainer = build_trainer(args)
        all_start_wandb(args, trainer.snapshots.folder, trainer.wandb_id)
        stop, problem = trainer.train()
    except torch.OutOfMemoryError as error:
        exit_out_of_memory(error, args)  # and never returns
    del trainer  # DDP has to go before the group that it talks through
    all_exit_if(problem)
    dist.destroy_process_group()
    sys.exit(128 + stop if stop else 0)  # as a shell says that a signal ended a process


if __name__ == "__main__":
    main(parse_args())
