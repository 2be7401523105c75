"""Exercises on single_gpu.py."""

from exercises.checks import ends_in_an_error, seen_by
from exercises.exercise import Exercise, first_complaint
from exercises.ways import observed, reference


def in_one_process(script, folder):
    """Five epochs of eight steps, and a save after each second epoch and the last."""
    return observed(script, folder, 5, 2, "--batch_size", 256, world_size=1)


def of_even_length(script, folder):
    """Four epochs: the last save is one of those that are due."""
    return observed(script, folder, 4, 2, "--batch_size", 256, world_size=1)


@seen_by(in_one_process)
def the_host_waits_in_each_step(run):
    first, *_, last = run.ranks[0]["epochs"][1]["reads until pass"]
    if last > first:
        return (
            f"between the first and the last of 8 steps a value was taken out of a tensor"
            f" {last - first} times; each time the host waits until the GPU has computed it"
        )


@seen_by(in_one_process)
def the_loss_is_another(run):
    want = reference("single_gpu.py", in_one_process).losses[0]
    if not run.losses or abs(run.losses[0] - want) > 1e-5:
        return f"of epoch 0 it is {want}, and {run.losses or 'none'} is printed"


@seen_by(of_even_length)
def a_save_comes_twice(run):
    if (saves := run.ranks[0]["saves"]) != [2, 4]:
        return f"4 epochs, --save_every 2: due after 2 and 4; saved after {saves}"


@seen_by(in_one_process)
def saves_are_not_those_that_are_due(run):
    if (saves := run.ranks[0]["saves"]) != [2, 4, 5]:
        times = ", ".join(map(str, saves)) or "none"
        return f"5 epochs, --save_every 2: due after 2, 4 and the last, 5; saved after {times}"


EXERCISES = [
    Exercise(
        "wait",
        """The loss of an epoch is right, but the GPU stands idle between two steps: in each of them
        the host waits for the GPU to take a value out of a tensor. Add the losses up without
        waiting, so that it waits once an epoch.""",
        "single_gpu.py",
        (
            (
                "totals[0] += loss.float() * len(source)  # float(): float16 could overflow",
                "totals[0] += loss.item() * len(source)",
            ),
        ),
        first_complaint(
            (ends_in_an_error, in_one_process), the_host_waits_in_each_step, the_loss_is_another
        ),
        "`.item()` waits for the GPU. A sum of tensors is a tensor: the GPU is given the work, and "
        "nobody waits for it",
    ),
    Exercise(
        "save",
        """A save is due after every `save_every` epochs and after the last one, so that no epoch is
        lost when training ends. Here some come at the wrong time. Mend the condition.""",
        "single_gpu.py",
        (
            (
                "if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:",
                "if epoch % self.save_every == 0:",
            ),
        ),
        first_complaint(
            (ends_in_an_error, in_one_process), saves_are_not_those_that_are_due, a_save_comes_twice
        ),
        "Epochs are counted from 0: after epoch 0, one epoch is done",
    ),
]
