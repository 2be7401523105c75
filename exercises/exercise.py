"""What an exercise is: a program with something missing, and a check that says what."""

import difflib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exercises.checks import STANDS_STILL, ends_in_an_error
from exercises.ranks import ROOT

WORK = Path(__file__).with_name("work")  # the reader's files
TORCHRUN = "torchrun --standalone --nproc_per_node=2"
OWN = "2 1 --snapshot_path exercises/work/own.pt"  # away from the reader's other snapshots


def edited(text: str, edits) -> str:
    """Each old text, which stands in it once, is new."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in the program")
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Exercise:
    """`check` takes the path of the reader's file and an empty folder. It returns what is wrong,
    in one or two lines, or None. It needs less than 20 s, two cores and no GPU."""

    name: str  # of the file in work/, after its number
    task: str  # three sentences at most
    script: str  # the solution: a script of the ladder by its path, or the text of a program
    edits: tuple[tuple[str, str], ...]  # what the task has in place of the solution: (old, new)
    check: Callable[[str, str], str | None]
    hint: str
    reads: str = ""  # where in the text it is explained: a file and a heading's anchor
    recipe: tuple[tuple[str, str], ...] = ()  # what the solution has and the script has not
    start: str = "python"  # what starts the file by hand
    arguments: str = ""  # and what is typed behind it
    suffix: str = ".py"

    def solution(self) -> str:
        is_path = "\n" not in self.script
        text = (ROOT / self.script).read_text() if is_path else self.script
        return edited(text, self.recipe)

    def handed_out(self) -> str:
        """The program as the reader gets it."""
        return edited(self.solution(), self.edits)

    def difference(self) -> str:
        """How the solution differs from what is handed out."""
        texts = (text.splitlines(keepends=True) for text in (self.handed_out(), self.solution()))
        return "".join(difflib.unified_diff(*texts, "as handed out", "a solution", n=1))

    def cannot_be_read(self, path: Path) -> str | None:
        """A mistake that Python sees before anything runs, by its line, or None."""
        try:
            compile(path.read_text(encoding="utf-8"), str(path), "exec")
        except SyntaxError as error:
            return f"Python cannot read line {error.lineno}: {error.msg}"
        except (OSError, ValueError) as error:
            return f"The file cannot be read: {error}"

    def judge(self, path: Path) -> str | None:
        """What is wrong with the reader's file, or None."""
        if problem := self.cannot_be_read(path):
            return problem
        with tempfile.TemporaryDirectory() as folder:
            return self.check(str(path.resolve()), folder)


def first_complaint(*asked):
    """A check made of those of checks.py: each run is made once, the first that says something
    is heard. A pair (check, way) looks at that way's run, a check alone at its first. The check
    has all of these as `asked`."""

    def check(path, folder):
        runs = {}
        for each in asked:
            each, way = each if isinstance(each, tuple) else (each, each.ways[0])
            if way not in runs:
                place = Path(folder) / way.__name__
                place.mkdir()
                runs[way] = way(path, str(place))
            try:
                says, message = each.says, each(runs[way])
            except (AttributeError, IndexError, KeyError, ValueError):  # the run left too little
                says = ends_in_an_error.says
                message = ends_in_an_error(runs[way]) or "not all ranks train to their end"
            if message:
                says = "" if message == STANDS_STILL else f"{says}: "
                message = says + message
                return message[0].upper() + message[1:]
        return None

    check.asked = asked
    return check
