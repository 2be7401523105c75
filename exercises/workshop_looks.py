"""What the checks of workshop.py share.

As a script it is one rank of the reader's program, which a function look_at_... looks at.
"""

import os
import runpy
import subprocess
import sys

from exercises import ranks


def what_went_wrong(statuses, output):
    """An error in one line, or None."""
    from exercises.checks import ERROR  # imports torch: not for look_at_call

    if statuses != {0}:
        if ranks.LATE in statuses:
            return "it stands still: no end within the time limit"
        errors = ERROR.findall(output)
        said = (output.strip().splitlines() or ["nothing is printed"])[-1]
        status = " and ".join(map(str, statuses))
        return errors[0] if errors else f"it ends with status {status}; the last line: {said}"


def looked_at(file, what, path, folder, *args, seconds=15, **options):
    """Run the ranks of the reader's program by look_at_`what` of that file."""
    options |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    options |= {"cwd": folder, "seconds": seconds}
    return ranks.quickly(__file__, file, what, path, *args, **options)


def run(path):
    """Run the reader's program as if it had been typed."""
    runpy.run_path(path, run_name="__main__")


def commands(folder, texts):
    """Commands of these names, in bash. The environment that finds them first."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def answer(*words, seconds=10, **env):
    """What a command of Slurm prints, and whether it ended well."""
    limit = ["timeout", "-k", "1", str(seconds)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([*limit, *map(str, words)], env=os.environ | env, **options)
    return done.returncode == 0, done.stdout.strip()


if __name__ == "__main__":
    holder, what, program = (sys.argv.pop(1) for _ in range(3))
    runpy.run_path(holder)[f"look_at_{what}"](program)
    sys.stdout.flush()
    os._exit(0)  # a group that is left could wait for the other rank
