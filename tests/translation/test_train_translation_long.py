"""train_translation.py as a whole: parts of a step, stops, resumes, GPUs."""

import json
import re
import signal
from pathlib import Path

import launch
import pytest
import torch
from launch import wait_for
from llm_runs import metrics
from test_train_translation import SCRIPT, translation


def newest(folder="weights"):
    """The newest snapshot, without the names of this save and its run."""
    snapshot = torch.load(max(Path(folder).glob("tmodel_*.pt")), weights_only=True)
    return {key: snapshot[key] for key in ("model", "optimizer", "steps_run", "best_loss", "seed")}


def test_two_processes_and_accumulation_end_where_one_process_ends(tmp_path):
    """Each batch has another number of tokens, and a pair that is none fills the last ones."""
    options = ("--dropout", 0, "--max-steps", 20, "--global-batch-size", 24, "--eval-freq", 10)
    found = {}
    for name, nproc, batch_size in [("one", 1, 24), ("parts", 1, 8), ("two", 2, 4)]:
        folder = ("--model-folder", name, "--batch-size", batch_size)
        launch.run(translation(*options, *folder, nproc=nproc))
        found[name] = [metrics(name, f"{part}/loss") for part in ("train", "validation")]
        found[name].append(newest(name)["model"])
    for other in "parts", "two":
        for part in 0, 1:
            assert found[other][part] == pytest.approx(found["one"][part], rel=1e-4)
        torch.testing.assert_close(found[other][2], found["one"][2], rtol=0, atol=2e-3)


# A CUDA graph writes its gradients to the same memory each time it runs. So do these hooks.
LIKE_CUDA_GRAPHS = """
import torch
import train_translation

class LikeCudaGraphs(train_translation.TranslationTrainer):
    def _fit_batch_size(self):
        for weight in self.model.parameters():
            def hook(gradient, memory=torch.empty_like(weight)):
                return memory.copy_(gradient).detach()
            weight.register_hook(hook)
        super()._fit_batch_size()

train_translation.TranslationTrainer = LikeCudaGraphs
train_translation.main(train_translation.parse_args())
"""


def test_gradients_add_up_where_each_pass_overwrites_those_of_the_last(tmp_path):
    Path("like_cuda_graphs.py").write_text(LIKE_CUDA_GRAPHS)
    options = ("--batch-size", 4, "--global-batch-size", 16, "--max-steps", 3, "--eval-freq", 9)
    command = translation(*options, "--model-folder", "usual")
    launch.run(command)
    command[command.index(SCRIPT)] = "like_cuda_graphs.py"
    command[command.index("usual")] = "graphs"
    launch.run(command, PYTHONPATH=launch.ROOT)
    torch.testing.assert_close(newest("graphs"), newest("usual"), rtol=0, atol=0)


def test_stopped_in_mid_epoch_it_ends_as_an_unbroken_run(tmp_path):
    """SIGTERM to two ranks; the same command goes on, and ends with the same bits."""
    command = translation("--num-epochs", 12, "--batch-size", 8, nproc=2)
    launch.run(command + ["--model_folder", "unbroken"], 120)
    job = launch.start(command)
    wait_for(job, lambda output: "Step 60/" in output)
    job.send_signal(signal.SIGTERM)
    status, output = launch.finish(job, 30)
    (step,) = re.findall(r"SIGTERM: saved at step (\d+), leaving", output)
    assert status == 128 + signal.SIGTERM and int(step) >= 60
    assert f"Resuming training from snapshot at Step {step}\n" in launch.run(command, 120)
    torch.testing.assert_close(newest(), newest("unbroken"), rtol=0, atol=0)
    for name in "train/loss", "validation/loss", "validation/bleu":
        assert metrics("weights", name) == metrics("unbroken", name)


def test_preload(tmp_path):
    """latest, the number of an epoch, none or an empty text; what is not there is one line."""
    options = ("--batch-size", 32, "--num-epochs")
    launch.run(translation(*options, 3))
    total = newest()["steps_run"]
    for word in "none", "":
        output = launch.run(translation(*options, 3, "--preload", word), status=2)
        assert "ERROR: preload: weights has snapshots: choose another --model-folder\n" in output
    output = launch.run(translation(*options, 3, "--preload", 7), status=2)
    assert "ERROR: preload: there is no tmodel_07.pt in weights\n" in output
    output = launch.run(translation(*options, 3, "--preload", 0))
    assert f"Resuming training from snapshot at Step {total // 3}\n" in output
    assert {path.name for path in Path("weights").glob("tmodel_*")} == {
        "tmodel_00.pt", "tmodel_01.pt", "tmodel_01.unused", "tmodel_02.pt", "tmodel_02.unused"
    }  # fmt: skip
    assert "there is nothing to train" in launch.run(
        translation(*options, 3, "--preload", "latest")
    )


BAD = {
    "heads": (["--heads", 3], "d-model: a multiple of 2 and of heads"),
    "data": (["--dataset", "no.tsv"], "dataset no.tsv: "),
    "language": (["--lang-tgt", "de"], r"dataset pairs.tsv: row 1: 'de' is not there"),
    "smoothing": (["--label-smoothing", 1], "label-smoothing: from 0 to 1"),
    "word": (["--layers", "x"], "layers: invalid int value"),
    "preload": (["--preload", "x"], "argument --preload: give latest, none or the number"),
    "too long": (["--seq-len", 3], r"dataset pairs.tsv: all \d+ pairs have more than 3 tokens"),
    "too few": (["--dataset", "few.tsv"], "dataset few.tsv: its 1 pairs are too few"),
    "other letters": (
        ["--dataset", "latin-1.tsv"],
        r"dataset latin-1.tsv: line 2, byte 10 \(0xe9\) is not UTF-8: convert the file",
    ),
    "damaged": (["--translate", "x"], "model-folder: weights/best is damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_of_translation_is_told_in_one_line(tmp_path, case):
    """One line that begins with ERROR, exit status 2, no traceback."""
    options, message = BAD[case]
    Path("few.tsv").write_text("en\tit\na\tb\n")
    Path("latin-1.tsv").write_text("en\tit\nwhy\tperché\n", encoding="latin-1")
    Path("weights/best").mkdir(parents=True)
    Path("weights/best/model.pt").write_text("no model")
    output = launch.run(translation(*options), status=2, HF_HUB_OFFLINE="1")
    errors = [line for line in output.splitlines() if not line.startswith("Rank: ")]
    assert len(errors) == 1 and re.match(f"ERROR: .*{message}", errors[0]), output


@pytest.mark.gpu(1)
@pytest.mark.parametrize("batch_size", [16, 4])
def test_translation_compiled_in_bfloat16_learns_what_the_cpu_learns(tmp_path, batch_size):
    """On a GPU: compiled for all lengths, in bfloat16, each loss near that of the CPU. And so if
    four batches add their gradients up."""
    # Without --layers a GPU would have the 6 of the large preset.
    options = ("--layers", 2, "--dropout", 0, "--max-steps", 30, "--batch-size", batch_size)
    options += ("--global-batch-size", 16)
    output = launch.run(translation(*options), 300)
    assert re.search("dtype bfloat16, compile True", output)
    launch.run(translation(*options, "--model-folder", "cpu"), CUDA_VISIBLE_DEVICES="")
    found, expected = (metrics(name, "train/loss") for name in ("weights", "cpu"))
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 0.05
    assert json.loads(Path("weights/best/sizes.json").read_text())["d_model"] == 32
