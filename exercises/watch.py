"""Run a reader's program in ranks that are watched: how far each comes, and what it prints.

This file also runs as a script: as one of these ranks.
"""

import io
import json
import os
import re
import runpy
import sys
import threading
import time
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist

from exercises.ranks import quickly

# A job stands still when all ranks have joined the group and none has computed for so many seconds,
STILL = 2
LATEST = 14  # or in any case after so many: these programs take one.
IDLE = 0.02  # Less processor time than that is not computing: it is the thread that looks.
WAITS, ENDED = "waits", "ended"
FIND = "\nIn which line each rank waits, the tools of docs/hangs.md tell"
WAITED = "Timed out", "Connection closed", "Connection reset", "Broken pipe"  # errors of a wait


names = {}  # what the program has defined, once it has come to its end


def watched(path, seen=dict):
    """Run the program as one rank, and save how far it came, what it said and `seen()`, once."""
    file, said = Path(f"rank{os.environ['RANK']}.json").resolve(), io.StringIO()
    pulse = file.with_suffix(".pulse")
    dist.destroy_process_group = lambda group=None: None  # may hang while DDP lives: not asked here

    def save(how, stack=(), error=""):
        lines = [frame.lineno for frame in stack if frame.filename == path]
        state = {"how": how, "line": (lines or [0])[-1], "error": error, "said": said.getvalue()}
        if not file.exists():
            file.write_text(json.dumps(state | {"seen": seen() if how == ENDED else {}}))
        if how == ENDED:
            pulse.touch()  # as one that has joined, even if it was so fast that nobody saw it
        if how == WAITS:
            time.sleep(2)  # if this rank ended now, others would no longer stand where they stood

    def look():
        end, used = time.monotonic() + LATEST, 0.0
        while time.monotonic() < end and not stands_still(file.parent):
            if dist.is_initialized() and time.process_time() > used + IDLE:
                used = time.process_time()
                pulse.touch()
            time.sleep(0.2)
        save(WAITS)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
    try:
        with redirect_stdout(said):
            names.update(runpy.run_path(path, run_name="__main__"))
        save(ENDED)
    except BaseException as error:
        waited = any(each in str(error) for each in WAITED)
        how = WAITS if waited else type(error).__name__
        if isinstance(error, SystemExit) and not error.code:
            how = ENDED
        save(how, traceback.extract_tb(error.__traceback__), str(error))
    os._exit(0)


def stands_still(folder):
    """Whether all ranks have joined the group, and none has computed since: not for STILL seconds.

    A rank that computes touches its file. On a busy machine it does so late, but it does."""
    pulses = [file.stat().st_mtime for file in folder.glob("rank*.pulse")]
    joined = len(pulses) == int(os.environ["WORLD_SIZE"])
    return joined and time.time() - max(pulses) > STILL


def run(path, folder, nproc, runner=__file__, **env):
    """How far each rank of the program came, as `watched` saved it; None of one that is gone."""
    Path(folder).mkdir(exist_ok=True)
    quickly(runner, path, nproc=nproc, cwd=folder, seconds=LATEST + 8, **env)
    files = [Path(folder) / f"rank{rank}.json" for rank in range(nproc)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def stopped(states):
    """What kept the ranks from their end, if anything did."""
    places = {}
    for rank, state in enumerate(states):
        how = state["how"] if state else "gone without a word"
        if how not in (WAITS, ENDED) and state:
            error = (state["error"].splitlines() or [""])[0][:150]
            return f"Rank {rank} ends at line {state['line']} with {how}: {error}"
        places.setdefault(how, []).append(f"rank {rank}")
    if list(places) == [ENDED]:
        return None
    waiting = places.get(WAITS, [])
    if len(waiting) == len(states):
        return f"The job stands still: all its ranks wait.{FIND}"
    gone = " and ".join(f"{' and '.join(ranks)} {how}" for how, ranks in places.items())
    return f"Not all ranks come to their end: {gone}.{FIND if waiting else ''}"


def numbers_of(states):
    """Those in the last line of each rank that begins with its name."""
    numbers = []
    for rank, state in enumerate(states):
        lines = re.findall(rf"^rank {rank}\b(.*)", state["said"], re.MULTILINE) or [""]
        numbers.append([float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", lines[-1])])
    return numbers


def job(nproc, wrong, path, folder):
    """The check of an exercise: `wrong` says what is wrong with the numbers of the ranks."""
    states = run(path, folder, nproc)
    return stopped(states) or wrong(numbers_of(states))


def differs(*wanted, within=0.01):
    """Says which number of a rank is not as wanted: pairs of a name and a value."""

    def wrong(ranks):
        for rank, numbers in enumerate(ranks):
            if len(numbers) != len(wanted):
                return f"It ends, but rank {rank} prints no line with its {len(wanted)} numbers"
            for (name, value), number in zip(wanted, numbers, strict=True):
                if not abs(number - value) < within:
                    return f"It ends, but rank {rank} has {name} {number}, right is {value}"
        return None

    return wrong


if __name__ == "__main__":
    watched(sys.argv[1])
