"""What is saved is finite: the loss, the weights that are trained, and buffers that once were."""

import pytest
import torch
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["body.0.weight", "body.1.running_var", "body.1.running_mean"])
def test_what_was_finite_has_to_stay_so(part, value):
    model = start(Model())
    assert checks.not_finite(0.5, model) is None
    model.state_dict()[part].view(-1)[1] = value
    assert checks.not_finite(0.5, model) == part


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_loss_has_to_be_finite(loss):
    assert checks.not_finite(loss, start(Model())) == "the loss"


def test_ddp_and_compile_change_no_names():
    """A mask is known as what it was, and what is bad is named as in the reader's model."""
    model = start(Model())
    wrapped = nn.Module()
    wrapped.module = torch.compile(model)  # as DDP has it
    assert checks.not_finite(0.5, wrapped) is None
    model.body[1].running_var[0] = torch.inf
    assert checks.not_finite(0.5, wrapped) == "body.1.running_var"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_is_a_mask_also_in_a_compiled_model(compiled):
    """Whether torch.compile comes before the start, in load_train_objs, or not at all."""
    model = start(torch.compile(Model()) if compiled else Model())
    assert checks.not_finite(0.5, model) is None


def test_a_buffer_that_comes_later_may_hold_infinity():
    """As a causal mask that the first forward pass makes."""
    model = start(Model())
    model.register_buffer("late", torch.full((2, 2), -torch.inf))
    assert checks.not_finite(0.5, model) is None


def test_lazy_buffers_and_small_types_have_no_effect():
    model = Model()
    model.lazy = nn.LazyBatchNorm1d()
    model.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))
    start(model)
    assert checks.not_finite(0.5, model) is None


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
