"""The options that every real run has."""

import argparse
import math
import re
import sys
from collections.abc import Callable

import torch

from plumbing.agree import Refused
from plumbing.arguments import all_exit_if_args_bad, cannot_write, refuse_usage
from training.binding import all_bind_cpus
from training.job import ddp_setup
from training.sampler import all_exit_on_remainder

POSITIVE = ("batch_size", "global_batch_size", "num_epochs", "max_steps", "log_freq", "eval_freq")
POSITIVE += ("ckpt_freq", "bucket_cap_mb", "timeout")
NOT_NEGATIVE = ("lr", "warmup_steps", "weight_decay", "clip_norm", "dropout", "seed")


def make_parser(doc: str, **defaults: str) -> argparse.ArgumentParser:
    """A parser with the options below, to which a program adds its own.

    `defaults` is what --help shows for those of the options below that have others in the program.
    """
    default = {"batch_size": "8", "num_epochs": "1", "lr": "from the model's width, or 5e-5"}
    default |= {"dropout": "0; for pretrained weights the model's own", "eval_freq": "250"}
    default |= {"ckpt_freq": "250", "wandb_group": "rank 0 only"} | defaults
    layout = {"usage": argparse.SUPPRESS, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=doc, epilog="(Defaults in parentheses.)", **layout)
    parser.error = refuse_usage
    option = parser.add_argument
    batch = f"sequences in a pass of one process ({default['batch_size']})"
    option("--batch-size", type=int, default=8, help=batch)
    together = "sequences in a step of all processes (batch size * processes)"
    option("--global-batch-size", type=int, help=together)
    epochs = f"how often to go through the data ({default['num_epochs']})"
    option("--num-epochs", type=int, default=1, help=epochs)
    option("--max-steps", type=int, help="train so many steps, whatever --num-epochs is")
    option("--lr", type=float, help=f"highest learning rate ({default['lr']})")
    warmup = "of a rising learning rate (a tenth of all, up to 2000)"
    option("--warmup-steps", type=int, help=warmup)
    option("--weight-decay", type=float, default=0.1, help="of matrices (0.1)")
    option("--clip-norm", type=float, default=1.0, help="longest gradient, 0: any (1.0)")
    option("--dropout", type=float, help=f"probability ({default['dropout']})")
    option("--seed", type=int, help="fixes initial weights, order and dropout (0)")
    option("--log-freq", type=int, default=10, help="steps from one line to the next (10)")
    evaluation = f"steps from one evaluation to the next ({default['eval_freq']})"
    option("--eval-freq", type=int, default=250, help=evaluation)
    snapshot = f"steps from one snapshot to the next ({default['ckpt_freq']})"
    option("--ckpt-freq", type=int, default=250, help=snapshot)
    resume = "snapshot: latest, its number, none (latest)"
    option("--resume", type=snapshot_to_resume, default="latest", help=resume)
    types = ("auto", "bfloat16", "float32")
    option("--dtype", choices=types, default="auto", help="of products (auto)")
    yes_or_no = argparse.BooleanOptionalAction
    option("--compile", action=yes_or_no, help="with torch.compile (on a GPU)")
    bucket = "MiB of gradients sent at once (100)"
    option("--bucket-cap-mb", type=int, default=100, help=bucket)
    option("--timeout", type=int, default=600, help="seconds to wait for another rank (600)")
    option("--bind-cpus", action="store_true", help="keep each process on the cores near its GPU")
    modes = {"choices": ("disabled", "offline", "online"), "default": "disabled"}
    option("--wandb", help="offline needs no account (disabled)", **modes)
    group = f"log every rank, in a group of this name ({default['wandb_group']})"
    option("--wandb-group", help=group)
    return parser


def snapshot_to_resume(text: str) -> str:
    """The type of `--resume`. Nothing is none."""
    if text and not re.fullmatch("latest|none|[0-9]{1,8}", text):
        kinds = "latest, none or the number of a snapshot"
        raise argparse.ArgumentTypeError(f"give {kinds}, not {text!r}")
    return text or "none"


def parse(parser: argparse.ArgumentParser, complete: Callable) -> argparse.Namespace:
    """Read the command line, with hyphens or underscores. A mistake is told later, once a machine.

    complete(args) sets args.folder, where the run saves, and what else follows from the options.
    """
    names = re.compile("^--[A-Za-z_]+")
    typed = [names.sub(lambda name: name[0].replace("_", "-"), each) for each in sys.argv[1:]]
    try:
        args = parser.parse_args(typed)
        complete(args)
        check(args)
    except ValueError as mistake:
        return argparse.Namespace(timeout=600, mistake=str(mistake))
    args.seed_is_typed, args.seed = args.seed is not None, args.seed or 0
    return args


def check(args: argparse.Namespace):
    """Raise a ValueError that says what is wrong with the options that every real run has."""
    least = dict.fromkeys(POSITIVE, 1) | dict.fromkeys(NOT_NEGATIVE, 0)
    for name, value in least.items():
        given = getattr(args, name)
        limit = math.inf if isinstance(given, float) else 2**31
        if given is not None and not value <= given < limit:
            raise Refused(f"{name.replace('_', '-')}: at least {value}, not {given}")
    if problem := cannot_write(args.folder, "choose another folder", make=True):
        raise Refused(problem)


def all_start(args: argparse.Namespace, paths: tuple[str, ...]) -> torch.device:
    """Join the group and see that all typed the same, but for `paths`; fill in what follows from
    the device, and return it."""
    device = ddp_setup(args.timeout)
    all_exit_if_args_bad(args, may_differ=paths)
    all_exit_on_remainder(args)
    if args.bind_cpus:
        all_bind_cpus(device)
    on_gpu = device.type == "cuda"
    args.compile = on_gpu if args.compile is None else args.compile
    if args.dtype == "auto":
        fast = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        args.dtype = "bfloat16" if fast else "float32"
    args.fits = False  # that is to be seen
    return device
