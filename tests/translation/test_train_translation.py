"""train_translation.py as a whole, with a tiny model, on the CPU."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import launch
import pytest
import torch
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
