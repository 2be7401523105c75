"""train_llm.py: a real run, with tiny models and data that lie in a folder, on the CPU."""

import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import launch
import pytest
import torch
from launch import LLM, gone, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config
from wandb_files import QUIET, read_runs

import train_llm

OFFLINE = {"HF_HUB_OFFLINE": "1"}  # or every test of an unknown name waits for the network


def llm(local, *args, nproc=None, model="gpt2", data="text.txt"):
    """The command of a run on local names, of python or, with `nproc`, of torchrun."""
    args = ("--model-name", local / model, "--dataset-name", local / data, *args)
    return launch.torchrun(LLM, *args, nproc=nproc) if nproc else launch.python(LLM, *args)


def metrics(folder, name):
    """{step: value} of what was logged as `name`."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return {line["global_step"]: line[name] for line in lines if name in line}


def newest(folder):
    """The newest snapshot of an experiment, without the names of this save, its run and data."""
    path = max(Path(folder).glob("snapshots/step-*.pt"))
    snapshot = torch.load(path, weights_only=True)
    return {key: value for key, value in snapshot.items() if not isinstance(value, str)}


def typed(start):
    """A command of the script's docstring, that begins with `start`, in one line."""
    text = " ".join(train_llm.__doc__.split())
    (command,) = re.findall(rf"{start}.*?--batch-size 64", text)
    return command


def test_pretraining_command(local, tmp_path):
    """The first named command learns, logs, draws, and leaves a model that transformers loads."""
    command = typed("OMP_NUM_THREADS=1 torchrun")
    assert "--nproc-per-node gpu" in command  # there is none here
    command = command.replace("--nproc-per-node gpu", "--nproc-per-node 2")
    command = command.replace("Skylion007/openwebtext", str(local / "openwebtext.parquet"))
    command = command.replace("openai-community/gpt2", str(local / "gpt2"))
    _, _, *options = shlex.split(command.replace("train_llm.py", LLM))
    options += ["--num-epochs", "8", "--lr", "1e-2", "--log-freq", "1", "--eval-freq", "5"]
    options += ["--wandb", "offline", "--wandb-group", "both"]
    launcher = launch.torchrun("x", options=())[:-2]
    output = launch.run([*launcher, *options], **QUIET)
    folder = tmp_path / "outputs" / "gpt2-openwebtext-A100"
    assert "128 sequences" in output and "Weights: fresh" in output
    assert output.count("Tokenised") == output.count("Global batch size") == 1

    losses = metrics(folder, "train/loss")
    last = max(losses)
    assert list(losses) == list(range(1, last + 1))
    assert abs(losses[1] - math.log(257)) < 0.2 and losses[last] < 0.7 * losses[1]
    validation = metrics(folder, "validation/loss")
    assert set(validation) == {*range(5, last, 5), last} and validation[last] < losses[1]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    launch.run([*launcher, *options, "--num-epochs", "9"], **QUIET)
    *runs, again, and_again = read_runs(folder)
    assert {again.id, and_again.id} == {run.id for run in runs}
    assert min(row["global_step"] for row in again.history) == last + 1
    assert [run.group for run in runs] == ["both"] * 2 and len({run.id for run in runs}) == 2
    for run in runs:
        x_axes = {name: axis for name, axis in run.x_axes.items() if axis}
        assert x_axes.keys() >= {"train/*", "validation/*"}
        assert set(x_axes.values()) == {"global_step"}
        logged = {
            row["global_step"]: row["train/loss"] for row in run.history if "train/loss" in row
        }
        assert logged == losses

    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    text = "the quick brown fox (é 日本)\n\tjumps"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    snapshot = newest(folder)
    assert not any(name.startswith("module.") for name in snapshot["model"])
    trained = AutoModelForCausalLM.from_config(model.config)
    trained.resize_token_embeddings(320)
    trained.load_state_dict(snapshot["model"])
    tokens = torch.tensor([tokenizer(text)["input_ids"][:32]])
    with torch.no_grad():
        logits, expected = model(tokens).logits, trained(tokens).logits[..., :257]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.long
def test_finetuning_command(local, tmp_path):
    """The second named command starts from the weights in the folder and goes on from there."""
    text = " ".join(train_llm.__doc__.split()).partition("Fine-tune: the same with ")[2]
    (options,) = re.findall(r"--experiment-name.* --init pretrained", text)
    options = options.replace("EleutherAI/gpt-neo-1.3B", str(local / "gpt-neo"))
    options = options.replace("stanfordnlp/imdb", str(local / "imdb.jsonl"))
    command = launch.torchrun(LLM, *shlex.split(options), "--batch-size", 64, "--max-steps", 2)
    output = launch.run([*command, "--warmup-steps", "1", "--log-freq", "1"])
    assert "Weights: pretrained" in output and "LR: 5.00e-05" in output
    before = AutoModelForCausalLM.from_pretrained(local / "gpt-neo").state_dict()
    after = AutoModelForCausalLM.from_pretrained("outputs/gpt-neo-imdb-A100/final").state_dict()
    changed = max((after[name] - before[name]).abs().max() for name in before)
    assert 0 < changed < 2e-4, "two steps of AdamW go no further than twice the learning rate"


@pytest.fixture
def oracle(local, tmp_path):
    """What plain autograd says on tiny GPT-2's first weights: f(training set?, indices)."""
    (tmp_path / "text.txt").write_text((local / "text.txt").read_text()[: 32 * 140])
    text = (tmp_path / "text.txt").read_text()
    tokens = torch.tensor([*train_llm.load_tokenizer("bytes")(text)["input_ids"], 256])
    order = torch.randperm(140, generator=torch.Generator().manual_seed(0))
    config = GPT2Config.from_pretrained(local / "gpt2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)

    def loss_and_gradient(held_out, indices, fresh=False):
        if fresh or not hasattr(loss_and_gradient, "model"):
            torch.manual_seed(0)
            loss_and_gradient.model = AutoModelForCausalLM.from_config(config)
        model = loss_and_gradient.model
        sequences = (order[:7] if held_out else order[7:]).sort().values[indices]
        rows = torch.stack([tokens[32 * i : 32 * i + 33] for i in sequences.tolist()])
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters()}

    return loss_and_gradient


def gradients(folder, steps):
    """The gradient of the last of `steps`, from what it added to AdamW's mean of gradients."""
    before, after = (
        torch.load(folder / f"snapshots/step-{step:08}.pt", weights_only=True) for step in steps
    )
    added = {
        index: (after["optimizer"]["state"][index]["exp_avg"] - 0.9 * state["exp_avg"]) / 0.1
        for index, state in before["optimizer"]["state"].items()
    }
    shapes = {
        name: tensor.dim() for name, tensor in after["model"].items() if "lm_head" not in name
    }
    # The optimizer counts matrices first, then vectors.
    names = [name for name in shapes if shapes[name] >= 2]
    names += [name for name in shapes if shapes[name] < 2]
    return {name: added[index][:257] for index, name in enumerate(names)}


@pytest.mark.long
def test_gradient_and_evaluation_do_not_depend_on_how_a_step_is_cut(local, tmp_path, oracle):
    """One batch, accumulated batches, two and three ranks: as plain autograd on the whole.

    133 sequences make steps of 66, 66 and 1: in the third, two of three ranks have none. Of the 7
    that are held out, each counts once.
    """
    options = ["--max-steps", 3, "--lr", 0, "--clip-norm", 0, "--ckpt-freq", 1]
    options += ["--global-batch-size", 66, "--log-freq", 1, "--dtype", "float32"]
    for name, nproc, batch_size in [
        ("whole", None, 66),
        ("accumulated", None, 22),
        ("two", 2, 11),
        ("three", 3, 11),
    ]:
        options += ["--experiment-name", name, "--batch-size", batch_size]
        enough_cpus = (nproc or 1) <= len(os.sched_getaffinity(0))
        bind = ["--bind-cpus"] if enough_cpus else []
        output = launch.run(llm(tmp_path, *options, *bind, nproc=nproc, model=local / "gpt2"))
        assert f"x {66 // batch_size // (nproc or 1)} (accumulation)" in output
        folder = tmp_path / "outputs" / name
        sampler = train_llm.StepSampler(133, batch_size, 66, seed=0)
        for step in 0, 1, 2:
            loss, gradient = oracle(False, sampler.sequences(step))
            assert metrics(folder, "train/loss")[step + 1] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(gradients(folder, (2, 3)), gradient, rtol=1e-4, atol=1e-7)
        loss, _ = oracle(True, torch.arange(7))
        assert metrics(folder, "validation/loss")[3] == pytest.approx(loss, rel=1e-6)


@pytest.mark.long
def test_a_step_is_that_of_adamw_with_clipping_and_a_schedule(local, tmp_path, oracle):
    """Norm before clipping, decay of matrices only, a linear rise and a cosine to a tenth.

    And where dropout is on, it is off in the evaluation.
    """
    options = ["--batch-size", 66, "--log-freq", 1, "--ckpt-freq", 1, "--lr", "1e-2"]
    options += ["--max-steps", 8, "--warmup-steps", 4, "--weight-decay", 0.5, "--clip-norm", 0.25]
    launch.run(llm(tmp_path, *options, model=local / "gpt2"))
    rates = list(metrics("outputs/default", "train/lr").values())
    cosine = [1 + math.cos(math.pi * step / 4) for step in range(4)]
    expected = [0.0025, 0.005, 0.0075, 0.01, *(0.01 * (0.1 + 0.45 * part) for part in cosine)]
    assert rates == pytest.approx(expected)

    options[options.index(8)] = 1  # the first step alone, at the highest rate
    options[options.index(4)] = 0
    launch.run(llm(tmp_path, *options, "--experiment-name", "one", model=local / "gpt2"))
    sampler = train_llm.StepSampler(133, 66, 66, seed=0)
    _, gradient = oracle(False, sampler.sequences(0))
    norm = torch.stack([each.norm() for each in gradient.values()]).norm().item()
    assert norm > 0.5 and metrics("outputs/one", "train/grad_norm")[1] == pytest.approx(norm, 1e-4)
    model, reference = newest("outputs/one")["model"], oracle.model
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in reference.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.25)
    optimizer.step()
    for name, parameter in reference.named_parameters():
        # Where a gradient is all but zero, its sign is a matter of rounding, and so is the step.
        sure = gradient[name].abs() > 1e-6
        found = model[name][: len(parameter)]
        torch.testing.assert_close(found[sure], parameter[sure].detach(), rtol=0, atol=1e-4)

    options += ["--experiment-name", "dropout", "--dropout", 0.5, "--lr", 0]
    launch.run(llm(tmp_path, *options, model=local / "gpt2"))
    loss, _ = oracle(True, torch.arange(7), fresh=True)
    assert metrics("outputs/dropout", "validation/loss")[1] == pytest.approx(loss, rel=1e-6)


@pytest.mark.long
def test_dropout_differs_between_ranks_and_the_best_model_is_the_best(local, tmp_path):
    """Where all sequences are the same, two ranks with one mask would have the loss of one rank.

    Nothing is learnt here, so only the first of the evaluations is better than those before.
    """
    (tmp_path / "same.txt").write_text("abcdefgh" * 100)
    options = ["--dataset-name", "same.txt", "--seq-length", 8, "--batch-size", 1, "--lr", 0]
    options += ["--dropout", 0.5, "--max-steps", 3, "--log-freq", 1, "--eval-freq", 1]
    losses = []
    for nproc in 1, 2:
        name = ("--experiment-name", f"on-{nproc}")
        output = launch.run(llm(local, *options, *name, nproc=nproc))
        losses.append(metrics(f"outputs/on-{nproc}", "train/loss")[1])
        assert output.count(f"Model saved at outputs/on-{nproc}/best") == 1
    assert abs(losses[0] - losses[1]) > 1e-4


LONG = ("--batch-size", 3, "--global-batch-size", 6, "--dropout", 0.1, "--lr", 1e-3)
LONG += ("--num-epochs", 3, "--log-freq", 1, "--ckpt-freq", 5, "--eval-freq", 20)
LONG += ("--init", "pretrained")  # whose dropout has to be on from the first step


@pytest.fixture(scope="module")
def unbroken(local, tmp_path_factory):
    """The experiment folder of a run of three epochs on two ranks that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launch.run(llm(local, *LONG, nproc=2), cwd=folder, **quiet)
    return folder / "outputs" / "default"


@pytest.fixture(scope="module")
def stopped(local, tmp_path_factory):
    """The folder and the output of the same run, which had SIGTERM in its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    job = launch.start(llm(local, *LONG, nproc=2), folder, **quiet)
    wait_for(job, lambda output: "Step 57/" in output)
    workers = descendants(job.pid)
    job.send_signal(signal.SIGTERM)
    status, output = launch.finish(job, 30)
    return folder / "outputs" / "default", status, output, workers


def descendants(pid):
    """The pids of all processes that `pid` has started, and those that these have started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def test_a_signal_leaves_a_snapshot_of_the_step_and_no_process(stopped):
    """SIGTERM to the launcher: all ranks and the processes that read data end, and all is saved."""
    folder, status, output, processes = stopped
    assert status == 1  # torchrun's own, whatever the processes say
    (step,) = re.findall(r"SIGTERM: saved at step (\d+), leaving", output)
    assert (folder / f"snapshots/step-{int(step):08}.pt").exists() and int(step) >= 57
    assert max(metrics(folder, "train/loss")) == int(step)
    assert len(processes) == 4, "two ranks and a process that reads data for each"
    assert gone(processes)


def test_resumed_run_ends_as_an_unbroken_one(local, tmp_path, stopped, unbroken):
    """Stopped in mid-epoch on two ranks, it goes on there, and ends with the same bits."""
    shutil.copytree(stopped[0], tmp_path / "outputs" / "default")
    output = launch.run(llm(local, *LONG, nproc=2))
    (step,) = re.findall(r"Resuming training from snapshot at Step (\d+)", output)
    losses = metrics("outputs/default", "train/loss")
    assert losses == metrics(unbroken, "train/loss") and 0 < int(step) < max(losses)
    torch.testing.assert_close(newest("outputs/default"), newest(unbroken), rtol=0, atol=0)


@pytest.mark.long
def test_resumed_on_other_numbers_of_ranks(local, tmp_path):
    """From two ranks to one and to three, in mid-epoch: each step as if it had been on one."""
    options = (*LONG, "--dropout", 0, "--max-steps", 60)
    launch.run(llm(local, *options, "--batch-size", 6, "--experiment-name", "unbroken"))
    expected = metrics("outputs/unbroken", "train/loss")
    job = launch.start(llm(local, *options, nproc=2))
    wait_for(job, lambda output: "Step 50/" in output)
    job.send_signal(signal.SIGTERM)
    _, output = launch.finish(job, 30)
    assert "SIGTERM: saved at step" in output
    for nproc, batch_size in (None, 6), (3, 2):
        shutil.copytree("outputs/default", f"outputs/on-{nproc}")
        name = ("--experiment-name", f"on-{nproc}", "--batch-size", batch_size)
        output = launch.run(llm(local, *options, *name, nproc=nproc))
        assert "Resuming training from snapshot at Step 5" in output
        assert metrics(f"outputs/on-{nproc}", "train/loss") == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_newest_snapshot_of_any_machine_wins(local, tmp_path, stopped, unbroken):
    """Two machines with a disk each: one has the newest, the other only the one before."""
    for name in "ab":
        shutil.copytree(stopped[0].parent, tmp_path / name / "outputs")
    newest_of_b = max(Path("b/outputs/default/snapshots").glob("step-*.pt"))
    newest_of_b.unlink()
    endpoint = f"localhost:{launch.free_port()}"
    names = ("--model-name", local / "gpt2", "--dataset-name", local / "text.txt")
    command = launch.agent(endpoint, *names, *LONG, script=LLM)
    nodes = [launch.start(command, tmp_path / name) for name in "ab"]
    ended = [launch.finish(node) for node in nodes]
    assert [status for status, _ in ended] == [0, 0], ended
    step = int(newest_of_b.stem[5:])
    assert f"Resuming training from snapshot at Step {step}\n" in "".join(log for _, log in ended)
    (folder,) = [path.parent for path in tmp_path.glob("*/outputs/default/final")]
    torch.testing.assert_close(newest(folder), newest(unbroken), rtol=0, atol=0)


@pytest.mark.long
def test_going_back_to_a_step(local, tmp_path, stopped):
    """--resume STEP goes on from there, and what came later is not the newest any more."""
    shutil.copytree(stopped[0], tmp_path / "outputs" / "default")
    earlier, later = sorted(Path("outputs/default/snapshots").glob("step-*.pt"))
    step = int(earlier.stem[5:])
    options = (*LONG, "--batch-size", 6, "--max-steps", step + 1)
    with open("outputs/default/metrics.jsonl", "a") as file:
        file.write('{"timestamp": 17')  # as of a run that was killed
    output = launch.run(llm(local, *options, "--resume", step))
    assert f"Resuming training from snapshot at Step {step}\n" in output
    assert "There is no" not in output
    names = {path.name for path in Path("outputs/default/snapshots").iterdir()}
    later_name = later.with_suffix(".unused").name
    assert names == {earlier.name, f"step-{step + 1:08}.pt", later_name}
    output = launch.run(llm(local, *options, "--seq-length", 16), status=2)
    assert "other data or with another --seq-length" in output.splitlines()[-1]


def test_every_sequence_is_seen_once_in_an_epoch_on_any_number_of_ranks(monkeypatch):
    """What the ranks read together in a step depends on seed, step and global batch size alone."""
    length, together = 133, 12

    def read(seed, world_size, first_step, steps):
        seen = [[] for _ in range(steps)]
        monkeypatch.setattr(train_llm.dist, "get_world_size", lambda: world_size)
        for rank in range(world_size):
            monkeypatch.setattr(train_llm.dist, "get_rank", lambda rank=rank: rank)
            sampler = train_llm.StepSampler(length, 2, together, seed)
            sampler.first_step = first_step
            batches = iter(sampler)
            for step in range(steps):
                for _ in range(sampler.accumulation(first_step + step)):
                    batch = next(batches)
                    assert len(batch) == 2
                    seen[step] += [index for index in batch if index >= 0]
        return seen

    seen = read(0, 1, 0, 24)
    epochs = [sorted(itertools.chain(*seen[:12])), sorted(itertools.chain(*seen[12:]))]
    assert epochs == [list(range(length))] * 2
    assert seen[:12] != seen[12:] and seen != read(1, 1, 0, 24)
    for world_size, first_step in [(2, 0), (3, 5), (6, 11), (1, 13)]:
        again = read(0, world_size, first_step, 24 - first_step)
        assert list(map(sorted, again)) == list(map(sorted, seen[first_step:]))


@pytest.mark.long
def test_damaged_newest_snapshot_is_told_and_the_one_before_is_used(local, tmp_path, stopped):
    """Cut off at any place, the newest is left as it is; without any good one the job ends."""
    shutil.copytree(stopped[0], tmp_path / "outputs" / "default")
    last, reserve = sorted(Path("outputs/default/snapshots").glob("*"), reverse=True)
    os.truncate(last, last.stat().st_size // 2)
    options = (*LONG, "--batch-size", 6, "--max-steps", int(reserve.stem[5:]))
    output = launch.run(llm(local, *options))
    assert output.count("WARNING") == 1 and f"{last.name} cannot be used" in output
    assert f"Resuming training from snapshot at Step {int(reserve.stem[5:])}\n" in output
    assert not last.exists() and last.with_suffix(".unused").exists()
    before = reserve.read_bytes()[:100]
    reserve.write_bytes(before)
    output = launch.run(llm(local, *options), status=2)
    error = output.splitlines()[-1]
    assert error.startswith(f"ERROR: {reserve} cannot be used") and "Move it away" in error
    assert reserve.read_bytes() == before


@pytest.mark.long
def test_cold_cache_is_made_once_and_a_cut_off_one_again(local, tmp_path):
    """Two jobs that start together share one cache; a file that lost its end is made again."""
    jobs = [launch.start(llm(local, "--max-steps", 1, "--experiment-name", name)) for name in "ab"]
    outputs = [launch.finish(job) for job in jobs]
    assert [status for status, _ in outputs] == [0, 0], outputs
    assert sum(output.count("Tokenised") for _, output in outputs) == 1
    (tokens,) = Path("outputs").glob("tokens-*/tokens.bin")
    whole = tokens.read_bytes()
    os.truncate(tokens, len(whole) // 2)
    output = launch.run(llm(local, "--max-steps", 1, "--experiment-name", "c"))
    assert output.count("Tokenised") == 1 and tokens.read_bytes() == whole


def test_folder_as_a_clone_of_the_hub_has_it(local, tmp_path):
    """Of a folder with a card, hidden files and parquet, the rows with a text are read."""
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "data" / ".git").mkdir(parents=True)
    (tmp_path / "data" / ".git" / "config").write_text("hidden")
    (tmp_path / "data" / "README.md").write_text("a card")
    (tmp_path / "data" / "dataset_infos.json").write_text('{"text": "about the data"}')
    (tmp_path / "data" / "saved").mkdir()
    (tmp_path / "data" / "saved" / "metrics.jsonl").write_text('{"text": "of a run"}')
    table = pyarrow.table({"url": ["http://a", "http://b"], "text": [None, "the text"]})
    pyarrow.parquet.write_table(table, tmp_path / "data" / "train.parquet")

    def read():
        files = train_llm.files_of(Path("data"), Path("data/saved"))
        return list(train_llm.read_documents("data", None, files))

    assert read() == ["the text"]
    (tmp_path / "data" / "train.parquet").unlink()
    assert read() == ["about the data"]
    (tmp_path / "data" / "dataset_infos.json").unlink()
    assert read() == ["a card"]
    long = "a line\n" * 9
    assert "".join(piece for piece, _ in train_llm.cut_documents([long, ""], 16)) == long
    assert [end for _, end in train_llm.cut_documents([long, ""], 16)] == [False] * 4 + [True] * 2


@pytest.mark.long
def test_default_run_writes_a_sample(tmp_path):
    """`python train_llm.py` trains on Python's own library and writes by itself, in two steps."""
    output = launch.run(launch.python(LLM, "--max-steps", 2, "--batch-size", 2))
    assert "byte-gpt" in output and "Steps: 2 " in output
    (given, added) = re.findall(r"A sample of outputs/default/final, after (.*):\n([^$]*)", output)[
        0
    ]
    assert len(given) > 16 and len(added) > 100
    output = launch.run(launch.python(LLM, "--max-steps", 2, "--batch-size", 2))
    assert "Resuming training from snapshot at Step 2\n" in output and "A sample of" in output
    output = launch.run(launch.python(LLM, "--resume", "none"), status=2)
    assert "choose another --experiment-name" in output


@pytest.mark.long
def test_a_second_signal_and_the_status_of_the_first(local, tmp_path):
    """Without a launcher the status says the signal, as a shell would: 128 + 10."""
    job = launch.start(llm(local, *LONG, "--batch-size", 6))
    wait_for(job, lambda output: "Step 3/" in output)
    job.send_signal(signal.SIGUSR1)
    status, output = launch.finish(job, 20)
    assert status == 128 + signal.SIGUSR1 and "SIGUSR1: saved at step" in output, output
    assert "Traceback" not in output

    job = launch.start(llm(local, *LONG, "--batch-size", 6, "--max-steps", 10**6))
    wait_for(job, lambda output: "Resuming" in output and "Step 20/" in output)
    job.send_signal(signal.SIGSTOP)  # so that it cannot be faster than the second signal
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGCONT)
    status, output = launch.finish(job, 20)
    assert status == 128 + signal.SIGTERM and "SIGTERM: saved at step" in output, "two at once"


@pytest.mark.long
def test_a_second_signal_leaves_at_once(local, tmp_path):
    """Where another rank hangs, so that the step does not end, the second signal ends this one."""
    job = launch.start(llm(local, *LONG, "--max-steps", 10**6, nproc=2))
    output = wait_for(job, lambda output: "Step 3/" in output)
    this, other = launch.pids(output)
    os.kill(other, signal.SIGSTOP)
    os.kill(this, signal.SIGTERM)
    time.sleep(4)
    assert launch.alive(this)
    os.kill(this, signal.SIGTERM)
    assert gone([this], 1)
    os.kill(other, signal.SIGCONT)
    launch.finish(job, 40)


@pytest.mark.long
def test_loss_that_is_not_a_number_stops_the_run(local, tmp_path):
    """The step is named, and the last good snapshot, which stays."""
    output = launch.run(
        llm(local, *LONG, "--batch-size", 6, "--clip-norm", 0, "--max-steps", 5, "--lr", 1e-4),
    )
    good = newest("outputs/default")
    output = launch.run(
        llm(local, *LONG, "--batch-size", 6, "--clip-norm", 0, "--max-steps", 90, "--lr", "1e30"),
        status=2,
    )
    error = output.splitlines()[-1]
    assert re.match(r"ERROR: the gradient of step \d+ is (nan|inf)", error), output
    assert "outputs/default/snapshots/step-00000005.pt" in error
    torch.testing.assert_close(newest("outputs/default"), good, rtol=0, atol=0)


OUT_OF_MEMORY = """
import sys
sys.path.insert(0, {root!r})
import torch, train_llm
def fail(trainer, step):
    raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0 has 79.11 GiB")
train_llm.Trainer._run_step = fail
train_llm.main(train_llm.parse_args())
"""


SMALL_GPU_ON_RANK_1 = """
import sys
sys.path.insert(0, {root!r})
import torch, train_llm
run_batch = train_llm.Trainer._run_batch
def fail(trainer, model, source, targets, targets_in_step):
    if trainer.rank == 1 and len(source) > 2:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
    return run_batch(trainer, model, source, targets, targets_in_step)
train_llm.Trainer._run_batch = fail
train_llm.main(train_llm.parse_args())
"""


@pytest.mark.long
def test_batch_that_does_not_fit_is_divided_and_the_steps_stay_the_same(local, tmp_path):
    """Where one of two GPUs is too small for 6 sequences and for 3, both take 1, and accumulate."""
    options = ("--batch-size", 6, "--max-steps", 3, "--log-freq", 1)
    (tmp_path / "small.py").write_text(SMALL_GPU_ON_RANK_1.format(root=str(launch.ROOT)))
    command = llm(local, *options, nproc=2)
    launch.run([*command, "--experiment-name", "large"])
    command[command.index(LLM)] = "small.py"
    output = launch.run(command)
    assert "6 sequences do not fit on a GPU. Going on with --batch-size 1 --global" in output
    assert "Global batch size: 1 (batch) x 6 (accumulation) x 2 (processes) = 12" in output
    for name in "train/loss", "validation/loss":
        small, large = (metrics(f"outputs/{folder}", name) for folder in ("default", "large"))
        assert small == pytest.approx(large, rel=1e-5)


@pytest.mark.long
def test_a_model_that_does_not_fit_is_told(local, tmp_path):
    """Where not even one sequence fits, no batch size helps."""
    source = SMALL_GPU_ON_RANK_1.replace("len(source) > 2", "True").replace(
        "rank == 1", "rank == 0"
    )
    (tmp_path / "small.py").write_text(source.format(root=str(launch.ROOT)))
    command = llm(local, "--batch-size", 2)
    command[command.index(LLM)] = "small.py"
    output = launch.run(command, status=2)
    advice = "Try a shorter --seq-length or a smaller model: even one sequence does not fit"
    assert advice in output.splitlines()[-1]


@pytest.mark.long
def test_out_of_memory_says_what_to_lower(local, tmp_path):
    """Half the batch with the same global batch makes the same steps: this is told, once."""
    (tmp_path / "full.py").write_text(OUT_OF_MEMORY.format(root=str(launch.ROOT)))
    command = llm(local, "--batch-size", 6, nproc=2)
    command[command.index(LLM)] = "full.py"
    output = launch.run(command, status=1)
    (error,) = re.findall("^ERROR: .*", output, re.MULTILINE)
    assert "6 sequences of 32 tokens do not fit on rank 0" in error and "79.11 GiB" in error
    assert "Try --batch-size 3 --global-batch-size 12 (the same steps, in more passes)" in error


BAD = {
    "a text that is too short": (["--dataset-name", "short.txt"], "seq-length: .* too few"),
    "an unknown model": (["--model-name", "no/such"], "model-name no/such: "),
    "an unknown data set": (["--dataset-name", "no/such"], "dataset-name no/such: "),
    "a sequence that is too long": (["--seq-length", 33], "model-name .* at most 32 tokens"),
    "a batch that does not divide": (["--global-batch-size", 12], "global-batch-size: 12 is not"),
    "a vocabulary that does not fit": (["--model-name", "small"], "257 tokens.* vocabulary 100"),
    "a step without a snapshot": (["--resume", 7], "no snapshot of step 7"),
    "a word for a number": (["--batch-size", "x"], "batch-size: invalid int value: 'x'"),
    "a number below the least": (["--max-steps", 0], "max-steps: at least 1, not 0"),
    "a resume of nothing": (["--resume", "newest"], "resume: give latest, none"),
    "a resume of step 0": (["--resume", "0"], "resume: give latest, none"),
    "a path for a name": (["--experiment-name", "../x"], "experiment-name: give the name"),
    "a folder of no use": (["--save-dir", "/proc/x"], "save-dir: cannot write in /proc/x"),
}


FIRST_BAD, *OTHER_BAD = BAD


@pytest.mark.parametrize(
    "case", [FIRST_BAD, *(pytest.param(case, marks=pytest.mark.long) for case in OTHER_BAD)]
)
def test_bad_input_is_told_in_one_line(local, tmp_path, case):
    """One line that begins with ERROR, exit status 2, no traceback."""
    options, message = BAD[case]
    (tmp_path / "short.txt").write_text("short")
    AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=100, n_layer=1, n_embd=8, n_head=1, n_positions=32)
    ).save_pretrained("small")
    train_llm.load_tokenizer("bytes").save_pretrained("small")
    output = launch.run(llm(local, *options), status=2, **OFFLINE)
    errors = [line for line in output.splitlines() if not line.startswith(("Rank: ", "Tokenised"))]
    assert len(errors) == 1 and re.match(f"ERROR: .*{message}", errors[0]), output


@pytest.mark.long
def test_full_disk_is_told_in_one_line_and_the_last_snapshot_stays(local, tmp_path):
    """A file-size limit that a snapshot exceeds stops the run soon after the save."""
    options = (*LONG, "--batch-size", 6, "--max-steps")
    launch.run(llm(local, *options, 5))
    (last,) = Path("outputs/default/snapshots").glob("*")
    before = last.read_bytes()
    command = shlex.join(llm(local, *options, 30))
    output = launch.run(["bash", "-c", f"ulimit -f 300; exec {command}"], status=2)
    error = output.splitlines()[-1]
    assert re.match("ERROR: cannot save in outputs/default: .*File too large", error), output
    assert "Traceback" not in output
    assert list(last.parent.glob("*")) == [last] and last.read_bytes() == before


@pytest.mark.long
def test_two_jobs_do_not_write_in_one_folder(local, tmp_path):
    """The second is told so, and the first goes on."""
    job = launch.start(llm(local, *LONG, "--batch-size", 6, "--max-steps", 10**6))
    wait_for(job, lambda output: "Step 3/" in output)
    output = launch.run(llm(local, *LONG, "--batch-size", 6), status=2)
    assert "experiment-name: another job is writing in outputs/default" in output
    job.send_signal(signal.SIGTERM)
    status, output = launch.finish(job, 30)
    assert status == 128 + signal.SIGTERM and "Traceback" not in output, output


@pytest.mark.long
def test_options_that_differ_between_machines_are_told(local, tmp_path):
    """Before anything is written or trained, in one line."""
    endpoint = f"localhost:{launch.free_port()}"
    nodes = []
    for seed in 1, 2:
        names = ("--model-name", local / "gpt2", "--dataset-name", local / "text.txt")
        command = launch.agent(endpoint, *names, "--seed", seed, script=LLM)
        nodes.append(launch.start(command, tmp_path / f"{seed}"))
    logs = "".join(launch.finish(node)[1] for node in nodes)
    assert logs.count("ERROR: seed: not the same on all machines\n") == 1, logs


@pytest.mark.long
def test_snapshots_of_two_jobs_are_not_mixed(local, tmp_path):
    """Each machine went on by itself once. Neither's snapshot is taken for that of both."""
    options = ("--model-name", local / "gpt2", "--dataset-name", local / "text.txt")
    for folder in "0", "1":
        launch.run(launch.python(LLM, *options, "--max-steps", 1), cwd=folder)
    snapshots = sorted(tmp_path.glob("*/outputs/default/snapshots/*"))
    before = [path.read_bytes() for path in snapshots]
    command = launch.agent(f"localhost:{launch.free_port()}", *options, script=LLM)
    nodes = [launch.start(command, folder) for folder in ("0", "1")]
    logs = "".join(launch.finish(node)[1] for node in nodes)
    error = "ERROR: outputs/default is not of the same job on all machines: move the others away\n"
    assert logs.count(error) == 1 and "Step 2/" not in logs, logs
    assert len(before) == 2 and [path.read_bytes() for path in snapshots] == before


@pytest.mark.long
@pytest.mark.parametrize("nproc", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
def test_compiled_bfloat16_on_gpus_learns_what_the_cpu_learns(local, tmp_path, nproc):
    """On one and two GPUs: compiled, in bfloat16, and each loss near that of the CPU in float32."""
    options = (*LONG, "--dropout", 0, "--batch-size", 3)
    output = launch.run(llm(local, *options, nproc=nproc), 300)
    assert "Matrix products: bfloat16 | Compiled: yes" in output
    assert re.search(r"MFU: \d|MFU: unknown", output) and "A sample of" in output
    assert not any("_orig_mod" in name for name in newest("outputs/default")["model"])
    launch.run(llm(local, *options, "--experiment-name", "cpu"), CUDA_VISIBLE_DEVICES="")
    found, expected = (metrics(f"outputs/{name}", "train/loss") for name in ("default", "cpu"))
    assert found.keys() == expected.keys()
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 0.02


@pytest.mark.long
@pytest.mark.gpu(2)
def test_resumed_run_on_gpus_ends_as_an_unbroken_one(local, tmp_path):
    """SIGTERM to a job on two GPUs with dropout: resumed, it ends with the unbroken weights.

    Not compiled: then a kernel adds in an order of its own, and no two runs have the same bits.
    """
    options = (*LONG, "--num-epochs", 20, "--no-compile")
    job = launch.start(llm(local, *options, nproc=2))
    wait_for(job, lambda output: "Step 57/" in output, 300)
    job.send_signal(signal.SIGTERM)
    status, output = launch.finish(job, 60)
    assert status == 1 and "SIGTERM: saved at step" in output, output
    output = launch.run(llm(local, *options, nproc=2), 300)
    assert "Resuming training from snapshot" in output
    launch.run(llm(local, *options, "--experiment-name", "unbroken", nproc=2), 300)
    broken, unbroken = newest("outputs/default"), newest("outputs/unbroken")
    torch.testing.assert_close(broken, unbroken, rtol=0, atol=0)
