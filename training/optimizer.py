"""AdamW as real runs have it."""

import torch


def adamw(model, lr: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """Of the parameters that learn, with weight decay for matrices only."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in learning if parameter.dim() >= 2]
    vectors = [parameter for parameter in learning if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},  # biases and norms have nothing to gain from it
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def make_gradients(optimizer: torch.optim.Optimizer):
    """Gradients of zero, for passes to add to. Where there is none yet, the tensor that a pass made
    becomes the gradient: if a CUDA graph made it, its next run would write over it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)


def make_optimizer_state(optimizer: torch.optim.Optimizer):
    """Take a step of nothing, so that the optimizer has its state: a snapshot goes into it.

    The state is zero afterwards, as of Adam, AdamW, and SGD without dampening before a first step.
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    make_gradients(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for value in state.values():  # a step has been counted, and weight decay is a gradient too
            if torch.is_tensor(value):
                value.zero_()
