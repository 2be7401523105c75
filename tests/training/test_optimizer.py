"""The state that an optimizer is given before a snapshot goes into it."""

from functools import partial

import pytest
import torch

from training.optimizer import make_optimizer_state

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def steps(make, with_state):
    """The weights and the state after three steps, with or without a state made at first."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = make(model.parameters(), lr=0.1)
    if with_state:
        make_optimizer_state(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        SGD,
        partial(SGD, momentum=0.9, weight_decay=0.1, nesterov=True),
        partial(ADAM, weight_decay=0.1),
        partial(ADAM, amsgrad=True),
        partial(ADAMW, weight_decay=0.1),
        partial(ADAMW, fused=True),
    ],
)
def test_a_fresh_run_is_the_same_with_and_without(make):
    for one, other in zip(steps(make, True), steps(make, False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_there_is_a_tensor_for_each_that_a_snapshot_has():
    for make in (partial(SGD, momentum=0.9), ADAM, ADAMW):
        optimizer = make(torch.nn.Linear(5, 3).parameters(), lr=0.1)
        make_optimizer_state(optimizer)
        _, saved = steps(make, False)
        assert optimizer.state_dict()["state"].keys() == saved["state"].keys()
        for number, state in optimizer.state_dict()["state"].items():
            assert state.keys() == saved["state"][number].keys()
