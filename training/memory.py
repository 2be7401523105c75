"""What does not fit: a batch that is too large for a GPU, and what is no number."""

import math
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from plumbing import agree
from training.job import explain
from training.signals import SIGNALS


def largest_divisor(number: int) -> int:
    """The largest divisor of `number` but itself."""
    return max(divisor for divisor in range(1, number) if number % divisor == 0)


def all_fit_batch_size(asked: int, try_pass: Callable[[int], None], eager_first: bool) -> int:
    """Divide a batch size until try_pass(batch_size) has enough memory on all ranks; return it.

    `eager_first`: the model is compiled for all sizes at once. For a batch far too large, with
    tensors of more than 2³¹ elements, the kernels would count in 64 bits. Smaller batches would get
    the same ones, from a cache on the disk even in later runs: one made half the tokens per second.
    """
    size = asked
    while not all_have_memory(size, try_pass, eager_first and size > 1):
        # An eager pass needs more memory, but to compile takes a minute. So it tries out the rest.
        size, eager_first = largest_divisor(size), True
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of what was only tried
    return size


def all_have_memory(size: int, try_pass: Callable[[int], None], eager_first: bool) -> bool:
    """Whether try_pass(size) has it on all ranks, as it is trained: compiled, if the model is."""
    for stance in ("force_eager", "default") if eager_first else ("default",):
        torch.cuda.empty_cache()  # the last try's, which CUDA graphs cannot use
        fits = torch.tensor(1)
        try:
            with torch.compiler.set_stance(stance):
                try_pass(size)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            fits = torch.tensor(0)
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        if not fits:
            torch._dynamo.reset()  # what was compiled for batches of that size is of no use now
            return False
    return True


def problem_with_gradients(norms: list[torch.Tensor], last_step: int, snapshots) -> str | None:
    """What is wrong if one of the norms, up to that of `last_step`, is NaN or infinite."""
    for step, norm in enumerate(torch.stack(norms).tolist(), last_step - len(norms) + 1):
        if not math.isfinite(norm):
            snapshots.writing.result()  # one may be on its way to the disk
            good = next(iter(snapshots.paths()), "none")
            advice = "lower --lr or --clip-norm"
            return f"the gradient of step {step} is {norm}: {advice}. Last good snapshot: {good}"
    return None


def exit_out_of_memory(error: torch.OutOfMemoryError, args):
    """Say what to lower when a GPU has not enough memory, and end the job."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(5 * dist.get_node_local_rank())  # one tells it, then torchrun ends those who wait
    size, together = args.batch_size, args.global_batch_size
    advice = "a shorter --seq-length or a smaller model: even one sequence does not fit"
    if args.fits and size > 1:
        sizes = f"--batch-size {largest_divisor(size)} --global-batch-size {together}"
        advice = f"{sizes} (the same steps, in more passes)"
    elif args.fits:
        advice = f"--seq-length {args.seq_length // 2}"
    what = f"{size} sequences of {args.seq_length} tokens do not fit on rank {dist.get_rank()}"
    agree.exit_alone(f"{what}: {explain(error)} Try {advice}")
