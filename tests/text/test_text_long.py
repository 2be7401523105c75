"""What the text says is run: its commands, and the lines that it shows."""

import os
import re
import shutil
import signal
import time
from itertools import pairwise

import pytest
from launch import ROOT, alive, copy_scripts, finish, pids, start_typed
from test_text import DOCUMENTS, README


def blocks(document):
    """The code blocks of a Markdown file as pairs (language, text), in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


def on_the_cpu(text):
    """What the text says about GPUs, said of two processes on the CPU."""
    return text.replace("node=gpu", "node=2")


def masked(text):
    """`text` without what differs from run to run: hosts, pids, losses."""
    return re.sub(r"(Host: |Pid: |Loss: )[\w.-]+", r"\1…", text)


@pytest.fixture
def project(tmp_path):
    """A copy of the scripts and of what they need, as in a new clone."""
    copy_scripts(tmp_path)
    for file in ROOT.glob("requirements*.txt"):
        shutil.copy(file, tmp_path)
    return tmp_path


def programs(document):
    """Each bash and Python block of a document with the lines that the text shows below it."""
    for (language, code), (following, lines) in pairwise([*blocks(document), ("", "")]):
        if language in ("bash", "python"):
            yield language, code, lines.splitlines() if following == "text" else []


def assert_shown(lines, output):
    for line in lines:
        assert line == "…" or masked(on_the_cpu(line)) in masked(output), f"{line}\n{output}"


def test_every_command_prints_what_the_text_shows(project):
    """Typed one after the other in one folder, as a reader does."""
    (_, first, shown), (_, tests, _), (_, activate, _), *typed = programs(ROOT / "README.md")
    assert tests.endswith(".venv/bin/python -m pytest\n")  # CI runs this one, and we are in it
    assert activate == ". .venv/bin/activate\n"
    setup, script = first.rsplit(" && .venv/bin/", 1)
    assert tests.startswith(setup)  # so CI runs the set-up too, and the script is left to run
    on_each = [block for block in typed for _ in range(1 + ("ADDRESS" in block[1]))]
    waiting = None
    for _, command, lines in [("bash", script, shown), *on_each]:
        command = command.replace("ADDRESS", "localhost")
        process = start_typed(on_the_cpu(command), project)
        if "--max-restarts" in command:
            output = kill_a_worker_and_see_it_resume(process)
        elif "--nnodes=2" in command and waiting is None:
            waiting = process, lines
            continue
        else:
            status, output = finish(process, 150)
            assert status == 0, output
        if waiting:
            status, more = finish(waiting[0], 60)
            assert status == 0, more
            output, lines, waiting = output + more, lines + waiting[1], None
        assert_shown(lines, output)


def kill_a_worker_and_see_it_resume(process):
    """As the text tells: kill -9 by the pid that was printed, once there is a snapshot."""

    def wait_for(line):
        end = time.monotonic() + 60
        while line not in process.log.read_text():
            assert process.poll() is None and time.monotonic() < end, process.log.read_text()
            time.sleep(0.1)

    wait_for("Training snapshot saved")
    os.kill(pids(process.log.read_text())[0], signal.SIGKILL)
    wait_for("Resuming training from snapshot at Epoch 100")
    process.send_signal(signal.SIGINT)
    _, output = finish(process, 60)
    assert not any(map(alive, pids(output)))
    return output


@pytest.mark.parametrize("document", DOCUMENTS[1:], ids=lambda path: path.name)
def test_the_code_in_the_docs_prints_what_they_show(document, project):
    """Each Python block is a whole program; each bash block runs as it stands."""
    for language, code, lines in programs(document):
        if language == "python":
            (project / "example.py").write_text(code)
            code = "python example.py"
        status, output = finish(start_typed(on_the_cpu(code), project), 60)
        assert status == 0, output
        assert_shown(lines, output)


def test_below_a_batch_of_16_the_rate_has_to_fall_with_it(project):
    """What step 2 says of small batches: 16 trains, 8 does not, and does with half the rate."""
    for claim in ("With a global batch of 8 the toy diverges", "a rate of 0.025 works"):
        assert claim in README
    script = (project / "single_gpu.py").read_text()
    (project / "slower.py").write_text(script.replace("lr=0.05", "lr=0.025"))
    first, last = {}, {}
    for name, size in ("single_gpu.py", 16), ("single_gpu.py", 8), ("slower.py", 8):
        status, output = finish(
            start_typed(f"python {name} 50 50 --batch_size {size}", project), 200
        )
        assert status == 0, output
        losses = [float(loss) for loss in re.findall(r"Loss: (\S+)", output)]
        first[name, size], last[name, size] = losses[0], losses[-1]
    assert last["single_gpu.py", 16] < first["single_gpu.py", 16] / 10
    assert last["single_gpu.py", 8] > first["single_gpu.py", 8]
    assert last["slower.py", 8] < first["slower.py", 8] / 5
