"""The command line: read in one place, checked, and the same on all machines."""

import argparse
import math
import os
import tempfile

from plumbing import agree, devices, launch, locks, processes, versions
from plumbing.agree import Refused

HELP = {
    "total_epochs": "epochs to train",
    "save_every": "epochs from one save to the next",
    "batch_size": "samples in a step of a process",
    "seed": "fixes the initial weights and the order of samples",
    "nproc": "processes, at most one per GPU",
    "timeout": "seconds to wait for another rank, then fail",
    "snapshot_path": "to save and resume",
}
YES, NO = ("yes", "true", "1"), ("no", "false", "0")


def parse_args(doc: str, defaults: dict, about: dict | None = None) -> argparse.Namespace:
    """Read the command line. A mistake ends the process.

    Under torchrun the process continues, because a rank that ended alone would keep the ranks of
    other machines waiting. There all_exit_if_args_bad prints the mistake and ends all.

    doc: what --help shows. defaults: the options and their values, each a whole number, a decimal
    number, a text, or True or False. What is typed has to be of the same kind. about: what --help
    says about an option, beside those of HELP.
    """
    parser = make_parser(doc, defaults, HELP | (about or {}))
    by_torchrun = "timeout" in defaults  # only such a script has this option
    try:
        args = parser.parse_intermixed_args()
        for name, default in defaults.items():
            setattr(args, name, checked(name, str(getattr(args, name)), default))
    except Refused as mistake:
        if not by_torchrun:
            parser.exit(2, f"{parser.prog}: error: {mistake}\n")
        args = argparse.Namespace(**defaults, mistake=str(mistake))
    if not by_torchrun:
        agree.all_exit_if(launch.not_alone(spawns="nproc" in defaults))
        agree.all_exit_if(cannot_write(os.getcwd(), "start it in a different folder"))
        processes.warn_if_perhaps_one_of_several()
        busy = f"a different job trains in {os.getcwd()}"
        again = f"If one launcher started both, see {launch.PAGE}"
        locks.all_own(".checkpoint.pt.lock", busy, f"start in a different folder. {again}")
    return args


def make_parser(doc: str, defaults: dict, about: dict) -> argparse.ArgumentParser:
    """Return a parser with an option for each default, with hyphens or underscores in its name."""
    layout = {"usage": argparse.SUPPRESS, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sizes = "(Defaults in parentheses.) Global batch size = batch_size * number of processes"
    parser = argparse.ArgumentParser(description=doc, epilog=sizes, **layout)
    parser.error = refuse_usage
    for name in ("total_epochs", "save_every"):
        parser.add_argument(name, nargs="?", default=argparse.SUPPRESS, help="as the option")
    for name, default in defaults.items():
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*names, default=default, help=explained(about.get(name), default))
    modes = {"choices": ("disabled", "offline", "online"), "default": "disabled"}
    parser.add_argument("--wandb", help="offline needs no account (disabled)", **modes)
    return parser


def explained(about: str | None, default) -> str:
    """Return the help text of an option. argparse takes a % for the beginning of a name."""
    shown = "yes" if default is True else "no" if default is False else default
    return " ".join(filter(None, (about, f"({shown})"))).replace("%", "%%")


def refuse_usage(message: str):
    """Raise what argparse would print, for ArgumentParser.error."""
    if "--local-rank" in message:
        message += ": that is of torch.distributed.launch: start with torchrun instead"
    raise Refused(message)


def checked(name: str, text: str, default) -> bool | int | float | str:
    """Return the value of an argument, of the kind of its default, or raise Refused."""
    if isinstance(default, bool):
        if text.lower() not in YES + NO:
            raise Refused(f"{name}: give yes or no, not {text!r}")
        return text.lower() in YES
    if isinstance(default, float):
        return checked_decimal(name, text)
    if name == "snapshot_path":
        if not text:
            raise Refused(f"{name}: give the path of a file, not ''")
        folder = os.path.dirname(os.path.realpath(text) if os.path.islink(text) else text) or "."
        if problem := cannot_write(folder, "choose a different one"):
            raise Refused(f"{name}: {problem}")
        return text
    if isinstance(default, str):
        return text
    least = 0 if name == "seed" else 1 if name in HELP else -(2**31)
    number = text.removeprefix("-") if least < 0 else text
    if not (number.isdecimal() and len(number) < 11 and least <= int(text) < 2**31):
        raise Refused(f"{name}: give a whole number from {least} to {2**31 - 1}, not {text!r}")
    if name == "nproc" and 0 < devices.count_gpus() < int(text):
        gpus = f"{devices.count_gpus()}, the number of GPUs here"
        raise Refused(f"{name}: give at most {gpus}, not {text}")
    return int(text)


def checked_decimal(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Refused(f"{name}: give a number, such as 0.001 or 1e-3, not {text!r}")
    return number


def cannot_write(folder: str, cure: str, make: bool = False) -> str | None:
    """Return why no file can be made in `folder`, or None.

    Without this check the first save would fail, epochs later.

    make: whether to make a folder that does not exist.
    """
    try:
        if make:
            os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write in {folder} ({error.strerror}): {cure}"
    return None


def all_exit_if_args_bad(args: argparse.Namespace, may_differ: tuple = ("snapshot_path",)):
    """End all ranks if an argument is wrong, or if the machines differ in arguments, code, devices.

    Each machine has its own command line, and perhaps its own copy of the script. If they differed,
    the ranks would train apart.

    may_differ: names of arguments that may have a different value on each machine.
    """
    agree.all_exit_if_devices_clash()
    versions.all_exit_if_code_differs()
    agree.all_exit_if(vars(args).get("mistake"))
    typed = agree.all_gather(vars(args))
    names = dict.fromkeys(name for each in typed for name in each)
    different = [key for key in names if any(each.get(key) != typed[0].get(key) for each in typed)]
    different = [key.replace("_", "-") for key in different if key not in may_differ]
    agree.all_exit_if(
        f"{', '.join(different)}: not the same on all machines" if different else None
    )
