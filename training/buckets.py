"""DDP's buckets of gradients: laid out before training, so that a resume has the same bits."""

import torch
from torch.nn.parallel import DistributedDataParallel


def all_fix_bucket_order(ddp: DistributedDataParallel):
    """Make DDP's first backward pass, without model and data. It leaves no trace.

    DDP lays out its buckets of gradients anew after its first pass. The place of a gradient in a
    bucket decides in which order the ranks' numbers are added, and a sum of three or more numbers
    is rounded by its order. A resumed run has a first pass as well, which would be rounded in a
    different way than the same pass of an unbroken run.
    """
    sparse = (module for module in ddp.module.modules() if getattr(module, "sparse", False))
    if any(sparse) or ddp.static_graph or ddp.find_unused_parameters:
        return  # the last lays nothing out anew, the others need the real gradients
    model, ddp.module = ddp.module, torch.nn.Identity()
    ddp.module.model = model  # DDP looks for its buffers there
    ddp(None)  # now it awaits a backward pass
    ddp.module = model
    sums = [weight.sum() for weight in model.parameters() if weight.requires_grad]
    torch.autograd.backward(sums, [torch.zeros_like(each) for each in sums])
    ddp.zero_grad()
