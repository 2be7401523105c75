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

import torch

from plumbing import agree, launch

SCRIPT = "the script"
SHOWN = 4  # files and places that a message names


def all_exit_if_code_differs():
    """End all ranks if a machine has a different version of the script or of a module beside it.

    Each machine may have a checkout of its own. With two versions the ranks would train apart.
    Different versions of Python or torch are a warning.
    """
    everyone = agree.all_gather((place(), digests(), versions()))
    if launch.rank() == 0 and (warning := different_versions(everyone)):
        print(f"WARNING: {warning}", file=sys.stderr)
    agree.all_exit_if(different_code(everyone))


def place() -> str:
    """Return the host and the folder of the script, as scp and rsync write it."""
    return f"{socket.gethostname()}:{folder_of_script() or os.getcwd()}"


def folder_of_script() -> str | None:
    script = getattr(sys.modules["__main__"], "__file__", None)
    return script and os.path.dirname(os.path.abspath(script))


def digests() -> dict[str, str]:
    """Return a digest of the script and of each module that was imported from its folder."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    found = {SCRIPT: script} if script else {}
    # A link to the script may be elsewhere: its modules are beside the file that it points to.
    folders = {str(Path(__file__).parents[1]), folder_of_script()}
    folders.add(os.path.dirname(os.path.realpath(script)) if script else None)
    folders = tuple(folder + os.sep for folder in folders if folder)
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


def versions() -> tuple[str, str]:
    return f"Python {platform.python_version()}", f"torch {torch.__version__}"


def different_versions(everyone: list) -> str | None:
    """Return which machines have which versions if they are not the same on all, or None."""
    for kind in range(2):
        hosts = {}
        for where, _, found in everyone:
            hosts.setdefault(found[kind], {})[where.partition(":")[0]] = True
        if len(hosts) > 1:
            which = ", ".join(f"{version} on {some(names)}" for version, names in hosts.items())
            return f"{which}. They may round differently, or not understand one another"
    return None


def different_code(everyone: list) -> str | None:
    """Return which files are not the same on all machines, and where, or None.

    The version that most ranks have counts as the right one, and if none has more, that of rank 0.
    A module that only some ranks have imported is not compared.
    """
    names, places = {}, {}
    for name in dict.fromkeys(name for _, files, _ in everyone for name in files):
        found = [(where, files[name]) for where, files, _ in everyone if name in files]
        (usual, _), *others = Counter(digest for _, digest in found).most_common()
        if others:
            names[name] = True
            places |= {where: True for where, digest in found if digest != usual}
    if not names:
        return None
    if SCRIPT in names:
        names = {os.path.basename(sys.modules["__main__"].__file__): True} | names
        del names[SCRIPT]
    same = next((where for where, *_ in everyone if where not in places), "the other machines")
    cure = "Bring all machines to one version"
    return f"{some(names)} of {some(places)}: not the same code as on {same}. {cure}"


def some(names) -> str:
    """Return the first of the names in words."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
