"""training/memory.py, in runs of train_llm.py: a batch that does not fit, and NaN."""

import pytest
import torch

from training.memory import all_fit_batch_size


@pytest.mark.parametrize(
    "asked, eager_first, tries",
    [
        # What compiles for one size: at once, since it may need less memory so.
        (12, False, ["12 compiled", "6 eager", "6 compiled", "3 eager", "3 compiled"]),
        # What compiles for all sizes: never for one that does not fit anyway.
        (12, True, ["12 eager", "6 eager", "6 compiled", "3 eager", "3 compiled"]),
        # After 1 there is nothing to try, so what counts is the compiled pass.
        (5, False, ["5 compiled", "1 compiled"]),
        (1, True, ["1 compiled"]),
    ],
)
def test_batch_fits_if_it_does_eager_and_compiled(alone, asked, eager_first, tries):
    """Of 6 sequences the eager pass fits, and the compiled one, with its CUDA graphs, does not."""
    fits, found = {"6 eager", "3 eager", "3 compiled", "1 compiled"}, []

    @torch.compile(backend="eager", dynamic=True)
    def is_compiled(batch):
        return batch + torch.compiler.is_compiling()

    def try_pass(size):
        compiled = bool(is_compiled(torch.zeros(size))[0])
        found.append(f"{size} {'compiled' if compiled else 'eager'}")
        if found[-1] not in fits:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")

    assert f"{all_fit_batch_size(asked, try_pass, eager_first)} compiled" == tries[-1]
    assert found == tries
