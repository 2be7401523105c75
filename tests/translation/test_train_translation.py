"""train_translation.py as a whole, with a tiny model, on the CPU."""

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import launch
import pytest
import torch
from launch import wait_for
from llm_runs import metrics

import train_translation
from translation.grammar import default_pairs

SCRIPT = str(launch.ROOT / "train_translation.py")
TINY = ("--dataset", "pairs.tsv", "--d-model", 32, "--heads", 2, "--d-ff", 64)
TINY += ("--tokenizer", "word", "--num-decode", 9, "--log-freq", 1, "--lr", "1e-2")


def translation(*args, nproc=1):
    """The command of a run on a few of the default pairs, in that many ranks without a launcher."""
    with open("pairs.tsv", "w") as file:
        file.write("en\tit\n" + "".join(f"{a}\t{b}\n" for a, b in default_pairs()[::40]))
    return launch.forked(SCRIPT, *TINY, *args, nproc=nproc)


def newest(folder="weights"):
    """The newest snapshot, without the names of this save and its run."""
    snapshot = torch.load(max(Path(folder).glob("tmodel_*.pt")), weights_only=True)
    return {key: snapshot[key] for key in ("model", "optimizer", "steps_run", "best_loss", "seed")}


def test_a_run_and_a_translation(tmp_path):
    """It learns, says how well it translates, keeps its names of files, and translates by hand."""
    output = launch.run(translation("--num-epochs", 3, "--batch-size", 16))
    assert output.count("Configuration: ") == 1 and "so a small preset for: layers\n" in output
    losses = metrics("weights", "train/loss")
    assert losses[max(losses)] < 0.8 * losses[1]
    assert output.count("PREDICTED: ") == 3 * 3
    pattern = r"Validation loss: \S+ \| BLEU \S+ \| chrF \S+ \| CER \S+ \| WER \S+ \| nrefs:1\|"
    assert len(re.findall(pattern, output)) == 3
    assert list(metrics("weights", "validation/bleu")) == list(
        metrics("weights", "validation/loss")
    )
    names = {path.name for path in Path("weights").iterdir()}
    assert {f"tmodel_0{epoch}.pt" for epoch in range(3)} <= names
    assert {"tokenizer_en.json", "tokenizer_it.json", "best", "final"} <= names

    sentence = default_pairs()[0][0]
    by_hand = [
        launch.run(translation("--translate", sentence, "--beam", beams)) for beams in (1, 3)
    ]
    assert all(text.strip() and text.count("\n") == 1 for text in by_hand), by_hand
    output = launch.run(translation("--translate", "x", "--model-folder", "no"), status=2)
    assert output == "ERROR: model-folder: there is no no/best/model.pt: train first\n"


def test_help_names_the_defaults_that_hold_here(monkeypatch, capsys):
    """Also of the options that every real run has, some with another default."""
    monkeypatch.setattr(sys, "argv", ["train_translation.py", "--help"])
    with pytest.raises(SystemExit):
        train_translation.parse_args()
    text = " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(sys, "argv", ["train_translation.py"])
    args = train_translation.parse_args()
    for name in "batch_size", "num_epochs", "lr", "d_model", "layers", "heads", "d_ff":
        option = re.search(rf"--{name.replace('_', '-')} [A-Z_]+ .*?\((.*?)\)", text)
        assert option[1].endswith(f"; without a GPU {getattr(args, name)}"), option[0]
    for name in "dropout", "wandb_group", "label_smoothing", "weight_decay", "vocab_size":
        option = re.search(rf"--{name.replace('_', '-')} [A-Z_]+ .*?\((.*?)\)", text)
        assert option[1] == str(getattr(args, name)), option[0]


def test_what_memory_py_advises_can_be_typed(monkeypatch):
    """train_llm.py has --seq-length, this program the name of its configuration besides."""
    for name in "--seq-len", "--seq-length", "--seq_len":
        monkeypatch.setattr(sys, "argv", ["train_translation.py", name, "20"])
        assert train_translation.parse_args().seq_len == 20


@pytest.mark.long
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


@pytest.mark.long
def test_gradients_add_up_where_each_pass_overwrites_those_of_the_last(tmp_path):
    Path("like_cuda_graphs.py").write_text(LIKE_CUDA_GRAPHS)
    options = ("--batch-size", 4, "--global-batch-size", 16, "--max-steps", 3, "--eval-freq", 9)
    command = translation(*options, "--model-folder", "usual")
    launch.run(command)
    command[command.index(SCRIPT)] = "like_cuda_graphs.py"
    command[command.index("usual")] = "graphs"
    launch.run(command, PYTHONPATH=launch.ROOT)
    torch.testing.assert_close(newest("graphs"), newest("usual"), rtol=0, atol=0)


@pytest.mark.long
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


@pytest.mark.long
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
    "language": (["--lang-tgt", "de"], r"dataset pairs.tsv: row 1 of pairs.tsv: 'de' is not there"),
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


@pytest.mark.long
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


def test_the_commands_of_the_docstring():
    """Their options are understood."""
    text = " ".join(train_translation.__doc__.replace("\\\n", "").split())
    commands = re.findall(r"(?:python|torchrun) .*?(?= (?:On two|With the|A dataset))", text)
    assert len(commands) == 3
    for command in commands:
        options = shlex.split(command.partition("train_translation.py")[2])
        (monkey := pytest.MonkeyPatch()).setattr("sys.argv", ["train_translation.py", *options])
        args = train_translation.parse_args()
        monkey.undo()
        assert "mistake" not in vars(args), args


@pytest.mark.long
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


@pytest.mark.parametrize("machines", [1, 2])
def test_cuda_graphs_of_a_whole_model_but_not_of_pieces(monkeypatch, machines):
    """Those of pieces crashed on two GPUs; between machines the model is compiled in pieces."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    names = ("cudagraphs", "cudagraph_dynamic_shape_warn_limit", "mix_order_reduction")
    before = {f"triton.{name}": getattr(inductor.triton, name) for name in names}
    monkeypatch.setattr("training.trainer.all_count_machines", lambda: machines)
    trainer = train_translation.TranslationTrainer.__new__(train_translation.TranslationTrainer)
    trainer.model = torch.nn.Linear(1, 1)
    with dynamo.patch(optimize_ddp=True), inductor.patch(before):  # which put all back at the end
        trainer._compile()
        assert dynamo.optimize_ddp == (machines > 1)
        assert inductor.triton.cudagraphs == (machines == 1)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_batch_is_tried_before_it_is_compiled(monkeypatch, compiled):
    """Smaller ones would get the slow kernels of one that is too large. And without --compile one
    pass is enough."""
    found = []

    def fit(asked, try_pass, eager_first):
        found.append(eager_first)
        return asked

    monkeypatch.setattr("training.trainer.all_fit_batch_size", fit)
    trainer = train_translation.TranslationTrainer.__new__(train_translation.TranslationTrainer)
    trainer.args = SimpleNamespace(batch_size=6, compile=compiled)
    trainer.sampler = SimpleNamespace()
    trainer._fit_batch_size()
    assert found == [compiled]
