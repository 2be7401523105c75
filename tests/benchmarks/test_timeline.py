"""benchmarks/timeline.py: what it makes of traces made by hand, and a tiny run."""

import json

import pytest
from timeline import Event, innermost, read, row, whole_steps

# What a GPU does in a step of 10 ms: name, begin, milliseconds.
STEP = [
    ("nvjet_hsh_128x256", 0, 3),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 3, 1),
    ("triton_red_fused_native_layer_norm_7", 4, 1),
    ("triton_poi_fused__scaled_dot_product_cudnn_attention_backward_9", 5, 1),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5, 3),
    ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 9, 1),
]


def trace(steps, zero, late=0):
    """A file as of torch.profiler. `late`: milliseconds by which this rank is later to send."""
    kernels = []
    for number in range(steps):
        for name, begin, duration in STEP:
            shift = late if "nccl" in name else 0
            event = {"cat": "kernel", "name": name, "dur": 1000 * (duration - shift)}
            kernels.append(event | {"ts": 1000 * (10 * number + begin + shift) - zero / 1000})
    others = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5.0}, {"name": "meta"}]
    return json.dumps({"baseTimeNanoseconds": zero, "traceEvents": others + kernels[::-1]})


def test_a_step_by_hand(tmp_path):
    """Its parts, and what one rank waits for the other, whose clock began elsewhere."""
    ranks = []
    for rank, (zero, late) in enumerate(((2_000_000, 0), (5_000_000, 1))):
        (tmp_path / f"{rank}").write_text(trace(4, zero, late))
        ranks.append(whole_steps(read(tmp_path / f"{rank}")))
    assert [len(steps) for steps in ranks] == [2, 2], "neither the first nor the last is whole"
    first, second = row([steps[0] for steps in ranks]), row([steps[0] for steps in ranks[::-1]])
    assert first == pytest.approx(
        {
            "sending": 3,
            "attention": 1,
            "matrix products": 3,
            "GELU, norms, loss": 2,
            "the rest": 1,
            "of it waiting": 1,
            "of it alone": 2,
            "nothing": 1,
            "step": 10,
        }
    )
    assert second["of it waiting"] == 0 and second["sending"] == pytest.approx(2)


def test_an_operator_has_the_time_in_which_it_calls_no_other():
    outer, inner, later = Event(0, 10, "a"), Event(2, 5, "b"), Event(12, 13, "c")
    parts = [Event(0, 2, "a"), Event(2, 5, "b"), Event(5, 10, "a"), Event(12, 13, "c")]
    assert innermost([outer, inner, later]) == parts
