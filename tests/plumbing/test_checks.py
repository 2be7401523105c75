"""What is saved is finite: the loss, the weights that are trained, and buffers that once were."""

import re
from pathlib import Path

import launch
import pytest
import torch
import torch.distributed as dist
from torch import nn

from plumbing import checks


class Model(nn.Module):
    """With a mask, with BatchNorm, and with a weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("smallest", torch.tensor(torch.inf))
        self.frozen = nn.Parameter(torch.tensor([torch.inf]), requires_grad=False)


def start(model):
    checks.all_exit_if_unusable([1], model)
    return model


def not_finite(loss, model):
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    watched = trained | checks.buffers_to_watch(model)
    return checks.not_finite(loss, watched, checks.sums_of(watched))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["body.0.weight", "body.1.running_var", "body.1.running_mean"])
def test_what_was_finite_has_to_stay_so(part, value):
    model = start(Model())
    assert not_finite(0.5, model) is None
    model.state_dict()[part].view(-1)[1] = value
    assert not_finite(0.5, model) == part


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_loss_has_to_be_finite(loss):
    assert not_finite(loss, start(Model())) == "the loss"


def test_ddp_and_compile_change_no_names():
    """A mask is known as what it was, and what is bad is named as in the reader's model."""
    model = start(Model())
    wrapped = nn.Module()
    wrapped.module = torch.compile(model)  # as DDP has it
    assert not_finite(0.5, wrapped) is None
    model.body[1].running_var[0] = torch.inf
    assert not_finite(0.5, wrapped) == "body.1.running_var"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_is_a_mask_also_in_a_compiled_model(compiled):
    """Whether torch.compile comes before the start, in load_train_objs, or not at all."""
    model = start(torch.compile(Model()) if compiled else Model())
    assert not_finite(0.5, model) is None


def test_a_buffer_that_comes_later_may_hold_infinity():
    """As a causal mask that the first forward pass makes."""
    model = start(Model())
    model.register_buffer("late", torch.full((2, 2), -torch.inf))
    assert not_finite(0.5, model) is None


def test_lazy_buffers_and_small_types_have_no_effect():
    model = Model()
    model.lazy = nn.LazyBatchNorm1d()
    model.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))
    start(model)
    assert not_finite(0.5, model) is None


def test_the_line(capsys):
    model = start(Model())
    model.body[1].running_var[0] = torch.inf
    with pytest.raises(SystemExit) as end:
        checks.all_exit_if_not_finite(0.5, model, [1])
    assert end.value.code == 2
    cure = "Lower the learning rate (the smaller the batch, the lower) or look at the data"
    bad = "body.1.running_var is not finite (loss 0.5)"
    assert capsys.readouterr().err == (
        f"ERROR: training diverged, nothing is saved: {bad}. {cure}\n"
    )


def test_a_sum_that_overflows_is_no_divergence():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 3e38)
    assert not_finite(0.5, start(model)) is None
    model.weight.data[1, 1] = torch.inf
    assert not_finite(0.5, model) == "weight"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_weights_of_all_types_are_looked_at(dtype):
    model = nn.ParameterDict({"w": torch.ones(3, 2, dtype=dtype)})
    assert not_finite(0.5, start(model)) is None
    model["w"].data[2, 1] = torch.nan
    assert not_finite(0.5, model) == "w"


def in_ddp(rank, init_method, case):
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method, rank=rank, world_size=3)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, dtype=torch.bfloat16))
    model.register_parameter("spectrum", nn.Parameter(torch.ones(4, dtype=torch.complex64)))
    model = nn.parallel.DistributedDataParallel(model)
    model.module[1].running_mean += rank  # each rank has its own, until DDP sends rank 0's
    checks.all_exit_if_unusable([1], model)
    checks.all_exit_if_not_finite(0.5, model, [1])
    first, last = model.module[0], model.module[2]
    weights = {"small": first.weight, "bfloat16": last.weight, "complex": model.module.spectrum}
    if rank == 2:
        with torch.no_grad():
            weights.get(case, first.bias[:1]).mul_(1 + 1e-5 if case == "small" else 2)
    checks.all_exit_if_not_finite(0.5, model, [1])
    checks.all_exit_if_not_finite(0.5, model, [1])
    print(f"rank {rank} continues", flush=True)
    del model
    dist.destroy_process_group()


@pytest.mark.parametrize("case", ["small", "bfloat16", "complex", "one number"])
def test_weights_that_differ_between_ranks_are_not_saved(case, tmp_path):
    folders = [str(launch.ROOT), str(launch.ROOT / "tests"), str(Path(__file__).parent)]
    (tmp_path / "driver.py").write_text(
        f"import os, sys\nsys.path[:0] = {folders}\nimport test_checks\n"
        f"test_checks.in_ddp(int(os.environ['RANK']), 'env://', {case!r})\n"
    )
    status, output = launch.finish(launch.start(launch.forked("driver.py", nproc=3)))
    if case == "small":
        assert status == 0 and output.count("continues") == 3, output
        (line,) = re.findall("^WARNING: (.*)$", output, re.MULTILINE)
        differs = r"0.weight of rank 2 on \S+ differs from that of rank 0 by 0.000\d+ %"
        assert re.match(differs, line)
    else:
        assert status == 2 and "continues" not in output
        (line,) = re.findall("^ERROR: (.*)$", output, re.MULTILINE)
        assert line.startswith("the ranks have different weights, nothing is saved: ")


def test_what_rounding_may_make_of_a_weight(monkeypatch):
    """In bfloat16 more, and near zero it is measured by the other weights of the model."""
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.add_(1e-6))
    near_zero = {"weight": torch.ones(100), "bias": torch.full((1,), 1e-6)}
    excess, relative, _ = checks.all_largest_difference(near_zero, 1000)
    assert excess < 1 and relative < 1e-5
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.mul_(1.01))
    for dtype, is_too_much in ((torch.float32, True), (torch.bfloat16, False)):
        excess, relative, name = checks.all_largest_difference({"w": torch.ones(9).to(dtype)}, 1000)
        assert (excess > 1) is is_too_much and name == "w" and 0.009 < relative < 0.011
    weights = {"w": torch.arange(5000.0)}
    assert checks.all_largest_difference(weights, 1000)[1] == pytest.approx(0.0099, rel=0.01)
