"""Exercises: programs with something missing, which you mend. They run on a laptop.

Run:  python -m exercises               list them
      python -m exercises 5             what to do; write the file if it is not there, and check it
      python -m exercises 5 --hint      where to look
      python -m exercises 5 --solution  one way to mend it, as a diff
      python -m exercises 5 --reset     begin this one anew
"""

import argparse
import json
import os
import sys
import textwrap

from exercises.catalogue import PARTS, TITLES
from exercises.exercise import WORK

ALL = [exercise for part in PARTS.values() for exercise in part]
SOLVED = WORK / "solved.json"


def coloured(text: str, code: int) -> str:
    """On a terminal, unless NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{code}m{text}\033[0m"


def bold(text):
    return coloured(text, 1)


def green(text):
    return coloured(text, 32)


def red(text):
    return coloured(text, 31)


def solved() -> set[str]:
    try:
        return set(json.loads(SOLVED.read_text()))
    except (OSError, ValueError):
        return set()


def remember(name: str, is_solved: bool):
    WORK.mkdir(exist_ok=True)
    names = solved() - {name} | ({name} if is_solved else set())
    SOLVED.write_text(json.dumps(sorted(names)))


def file_of(exercise):
    return WORK / f"{ALL.index(exercise) + 1:02}_{exercise.name}{exercise.suffix}"


def list_all():
    done = solved()
    for title, part in PARTS.items():
        print(bold(title))
        for exercise in part:
            mark = green("✓") if exercise.name in done else " "
            print(
                f"  {mark} {ALL.index(exercise) + 1:2}  {exercise.name:16} {TITLES[exercise.name]}"
            )
    print(f"{len(done & {each.name for each in ALL})} of {len(ALL)} solved.", end=" ")
    left = [i for i, each in enumerate(ALL, 1) if each.name not in done]
    print(f"Next: python -m exercises {left[0]}" if left else "Well done.")


def check(exercise):
    """Explain, write the file if it is not there, and judge it. Return the exit status."""
    path, number = file_of(exercise), ALL.index(exercise) + 1
    where = os.path.relpath(path)
    print(bold(f"Exercise {number}: {exercise.name}"))
    print(textwrap.fill(" ".join(exercise.task.split()), 96))
    if not path.exists():
        WORK.mkdir(exist_ok=True)
        path.write_text(exercise.handed_out())
        print(f"Written for you: {where}")
    path_of_ours = "PYTHONPATH=. " * ("import plumbing" in exercise.solution())
    print(f"By hand: {path_of_ours}{exercise.start} {where} {exercise.arguments}".rstrip())
    print(f"Checking {where} ...", flush=True)
    try:
        problem = exercise.judge(path)
    except Exception as error:  # a cure that nobody thought of may leave the check without a view
        problem = f"the check finds less than it needs ({type(error).__name__}: {error})"
    remember(exercise.name, problem is None)
    if problem is None:
        print(green("✓ Solved.") + " One solution of several: --solution shows it.")
        return 0
    print(red("✗ ") + problem)
    print(f"Edit the file and run this again. (python -m exercises {number} --hint)")
    if exercise.reads:
        print(f"If you are stuck, it is explained in {exercise.reads}")
    return 1


def reset(exercise):
    """Write the file as it was handed out. What the reader has made of it is kept."""
    WORK.mkdir(exist_ok=True)
    path = file_of(exercise)
    old = path.with_name(f"{path.name}.old")
    if path.exists():
        path.replace(old)
        print(f"Yours is kept as {os.path.relpath(old)}, and the exercise counts as not solved.")
    path.write_text(exercise.handed_out())
    remember(exercise.name, False)
    print(f"{os.path.relpath(path)} is as it was handed out")


def find(wanted: str):
    for number, exercise in enumerate(ALL, 1):
        if wanted in (str(number), f"{number:02}", exercise.name):
            return exercise
    line = f"there is no exercise {wanted}: give 1 to {len(ALL)}, or a name from the list"
    print(f"python -m exercises: {line}", file=sys.stderr)
    sys.exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m exercises",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("exercise", nargs="?", help="a number or a name of the list")
    action = parser.add_mutually_exclusive_group()
    for name in ("hint", "solution", "reset"):
        action.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.exercise is None:
        if args.hint or args.solution or args.reset:
            parser.error("which exercise? Give its number")
        list_all()
        return 0
    exercise = find(args.exercise)
    if args.hint:
        print(exercise.hint)
    elif args.solution:
        print(exercise.difference(), end="")
    elif args.reset:
        reset(exercise)
    else:
        return check(exercise)
    return 0


if __name__ == "__main__":
    # Of processes that were ended, another tells what they left; it is gone when this one ends.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped")
