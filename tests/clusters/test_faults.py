"""A small fixed part of faults.py: what is broken on purpose comes back, and nothing is lost.

The whole, 200 runs and more, is for people: its table stands in docs/reliability.md.
"""

import re

import faults
import launch


def test_the_program_starts_as_the_page_has_it():
    """By itself, where pytest has not told Python where things are."""
    (command,) = re.findall(
        r"`python (tests/faults.py) --runs 200 ", (launch.ROOT / "docs/reliability.md").read_text()
    )
    output = launch.run(launch.python(str(launch.ROOT / command), "--list"), PYTHONPATH="")
    assert output.split("\n") == [*(fault.name for fault in faults.faults()), ""]


def test_every_fault_has_its_row():
    """The table in docs/reliability.md leaves out no fault that the harness has, and lost none."""
    text = (launch.ROOT / "docs" / "reliability.md").read_text()
    rows = re.findall(r"^\| (.*?) \| ([\d +]+) \| (\d+) \|", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == [fault.name for fault in faults.faults()]
    for fault in faults.faults():
        (runs,) = [runs for name, runs, _ in rows if name == fault.name]
        assert len(runs.split(" + ")) == len(fault.scripts), f"{fault.name}: on each script"
    assert {lost for _, _, lost in rows} == {"0"}
    head = (
        r"^(\d+) runs with seed \d+, (\d+) lost\. \d+ were aimed into a save, and in (\d+) of these"
    )
    ((count, lost, hit),) = re.findall(head, text, re.MULTILINE)
    assert int(count) >= 200 and int(lost) == 0 and int(hit) >= 60
