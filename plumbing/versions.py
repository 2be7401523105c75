"""All machines run the same program: its code is compared, and the versions of Python and torch."""

import hashlib
import os
import platform
import socket
import sys
import sysconfig
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from plumbing import agree, launch

SCRIPT = ""  # its name among the files: it may be called differently on each machine
SHOWN = 4  # files and places that a message names


class Program(NamedTuple):
    """What a process runs."""

    place: str  # its host and folder
    script: str  # its name
    files: dict[str, str]  # the digest of the script and of each module
    versions: tuple[str, ...]  # of Python and torch


def all_exit_if_code_differs():
    """End all ranks if a machine has a different version of the script or of a module beside it.

    Each machine may have a checkout of its own. With two versions the ranks would train apart.
    Different versions of Python or torch are a warning.
    """
    # As a plain tuple, which a different version of this module can read too.
    everyone = agree.all_gather(tuple(this_program()))
    if any(len(each) != len(Program._fields) for each in everyone):
        agree.exit_alone("plumbing/ is not the same on all machines. Bring all to one version")
    everyone = [Program(*each) for each in everyone]
    if launch.rank() == 0 and (warning := different_versions(everyone)):
        print(f"WARNING: {warning}", file=sys.stderr)
    agree.all_exit_if(different_code(everyone))


def this_program() -> Program:
    script = path_of_script() or "the program"
    place = f"{socket.gethostname()}:{os.path.dirname(os.path.abspath(script))}"
    versions = f"Python {platform.python_version()}", f"torch {torch.__version__}"
    return Program(place, os.path.basename(script), digests(), versions)


def path_of_script() -> str | None:
    return getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none


def digests() -> dict[str, str]:
    """Return a digest of the script and of each module that was imported from its folder."""
    script = path_of_script()
    found, folders = {SCRIPT: script} if script else {}, {str(Path(__file__).parents[1])}
    # The script may be started by a link, and its modules are beside the file that it points to.
    for path in (os.path.abspath(script), os.path.realpath(script)) if script else ():
        folders.add(os.path.dirname(path))
    folders = tuple(folder + os.sep for folder in folders)
    installed = sysconfig.get_path("stdlib") + os.sep, "site-packages"
    for module in list(sys.modules.values()):
        path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if not isinstance(path, str) or not path.startswith(folders) or not path.endswith(".py"):
            continue
        if not any(part in path for part in installed):  # an environment may be in the folder too
            name = min((path.removeprefix(folder) for folder in folders), key=len)
            found[name] = path
    return {name: digest for name, path in found.items() if (digest := digest_of(path))}


def digest_of(path: str) -> str | None:
    with suppress(OSError):  # a module of a zip file
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return None


def different_versions(everyone: list[Program]) -> str | None:
    """Return which machines have which versions if they are not the same on all, or None."""
    for kind in range(2):
        hosts = {}
        for program in everyone:
            host = program.place.partition(":")[0]
            hosts.setdefault(program.versions[kind], {})[host] = True
        if len(hosts) > 1:
            which = ", ".join(f"{version} on {some(names)}" for version, names in hosts.items())
            return f"{which}. They may round differently, or not understand one another"
    return None


def different_code(everyone: list[Program]) -> str | None:
    """Return which files are not the same on all machines, and where, or None.

    The version that most ranks have counts as the right one, and if none has more, that of rank 0.
    A module that only some ranks have imported is not compared.
    """
    names, places = {}, {}  # as sets that keep their order
    for name in dict.fromkeys(name for program in everyone for name in program.files):
        having = [program for program in everyone if name in program.files]
        (usual, _), *others = Counter(program.files[name] for program in having).most_common()
        for program in having if others else ():
            if program.files[name] != usual:
                names[name or program.script] = places[program.place] = True
    if not names:
        return None
    same = next((each.place for each in everyone if each.place not in places), "other machines")
    cure = "Bring all machines to one version"
    return f"{some(names)} of {some(places)}: not the same code as on {same}. {cure}"


def some(names) -> str:
    """Return the first of the names in words."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
