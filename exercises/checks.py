"""What can be wrong with a script of the ladder: each check says so in one line, or returns None.

A check looks at what a run left. Its name is what is wrong if it says something, and its `ways` are
how the script can have been run for it.
"""

import re

import torch

from exercises.ranks import LATE
from exercises.ways import (
    by_itself,
    failing_under_torchrun,
    in_ranks,
    moved,
    on_stand_in_gpus,
    one_process,
    resumed,
    seeing_one_stand_in_gpu,
    typed,
    typed_with_no_data,
    unbroken,
    with_a_buffer_that_becomes_infinite,
    with_a_different_optimizer,
    with_a_full_disk,
    with_a_model_in_eval_mode,
    with_a_rank_that_stops,
    with_another_seed_on_rank_1,
    with_snapshots_of_two_jobs,
    with_two_snapshots_of_one_epoch,
)

STANDS_STILL = "it stands still: within 15 s not all processes came to their end"
ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)


def seen_by(*ways):
    """The check can look at what any of these ways leaves. The first is taken unless told."""

    def mark(check):
        check.ways, check.says = ways, check.__name__.replace("_", " ")
        return check

    return mark


def furthest(one: dict, other: dict) -> float:
    """The largest difference between weights."""
    return max((one[name] - other[name]).abs().max().item() for name in other)


# Any script of the ladder.


@seen_by(in_ranks, resumed, moved)
def ends_in_an_error(run):
    if run.before and (said := ends_in_an_error(run.before)):
        return said
    if run.statuses != {0}:
        told = re.search(r"^(?:ERROR|\S+: error): .*", run.output, re.MULTILINE)
        errors = [told[0]] if told else ERROR.findall(run.output)
        if LATE in run.statuses and not errors:
            return STANDS_STILL
        said = (run.output.strip().splitlines() or ["nothing is printed"])[-1]
        return errors[0] if errors else f"the last line is: {said}"


@seen_by(typed)
def the_command_ends_in_an_error(run):
    return ends_in_an_error(run)


@seen_by(by_itself)
def nothing_was_trained(run):
    if "Epoch 0 " not in run.output:
        return f"it prints {run.output!r}"


@seen_by(with_a_model_in_eval_mode)
def trained_in_eval_mode(run):
    if not run.ranks[0]["epochs"][0]["in training mode"]:
        return "dropout drops nothing, and BatchNorm does not learn its statistics"


# Several processes.


@seen_by(typed)
def not_one_process_for_each_rank(run):
    sizes = re.findall(r"Rank: \d+ \| World size: (\d+)", run.output)
    if sizes != ["2", "2"]:
        return f"2 processes are to say their rank, and {len(sizes)} did"


@seen_by(in_ranks, with_two_snapshots_of_one_epoch)
def ranks_hold_other_weights(run):
    zero, *others = (seen["end"]["weights"] for seen in run.ranks)
    for rank, other in enumerate(others, 1):
        if (away := furthest(zero, other)) > 0:
            return f"rank {rank}'s are up to {away:.4f} away from rank 0's"


@seen_by(in_ranks)
def ranks_saw_the_same_samples(run):
    zero, other = (seen["epochs"][0]["samples"] for seen in run.ranks)
    if both := set(zero) & set(other):
        return f"{len(both)} of {len(set(zero) | set(other))} samples of epoch 0"


@seen_by(in_ranks)
def epoch_repeated(run):
    for rank, seen in enumerate(run.ranks):
        first, second, _ = (epoch["samples"] for epoch in seen["epochs"])
        if first == second:
            return f"rank {rank} had samples {first[:3]}... in this order in epochs 0 and 1"


@seen_by(in_ranks)
def dropout_equal_on_ranks(run):
    zero, other = ([epoch["draws"] for epoch in seen["epochs"]] for seen in run.ranks)
    if zero == other:
        return f"both drew {zero[0][0]:.4f} first"


@seen_by(in_ranks)
def weights_differ_from_one_process(run):
    want = one_process().ranks[0]["end"]["weights"]
    for rank, seen in enumerate(run.ranks):
        if (away := furthest(seen["end"]["weights"], want)) > 1e-5:
            return f"rank {rank}'s are up to {away:.4f} away"


@seen_by(in_ranks)
def loss_is_that_of_one_rank(run):
    (want,) = one_process().losses
    for loss in run.losses:
        if abs(loss - want) > 1e-5:
            return f"{' and '.join(map(str, run.losses))} printed, one process: {want}"


@seen_by(in_ranks)
def two_writers_of_one_file(run):
    files = [*run.folder.glob("rank*/checkpoint.pt"), *run.folder.glob("rank*/snapshot.pt")]
    writers = sorted(path.parent.name for path in files)
    if writers != ["rank0"]:
        return f"a file was written by {' and '.join(writers) or 'no rank'}"


@seen_by(in_ranks)
def keys_with_module(run):
    keys = torch.load(run.folder / "rank0" / "checkpoint.pt", weights_only=True).keys()
    if wrong := keys - one_process().ranks[0]["end"]["weights"].keys():
        return f"{min(wrong)!r} in checkpoint.pt"


@seen_by(in_ranks)
def said_more_than_once(run):
    if (times := run.output.count("Global batch size: ")) != 1:
        return f"'Global batch size' stands {times} times in the output"


@seen_by(in_ranks)
def DDP_outlives_its_group(run):
    if alive := [rank for rank, seen in enumerate(run.ranks) if seen.get("DDP is alive")]:
        return f"ranks {alive} took the group down from under it"


@seen_by(in_ranks)
def group_is_left(run):
    if left := [rank for rank, seen in enumerate(run.ranks) if seen["group is left"]]:
        return f"ranks {left} have not taken it down"


@seen_by(on_stand_in_gpus, seeing_one_stand_in_gpu)
def a_process_takes_a_GPU_that_is_not_its_own(run):
    chosen = re.findall(r"^(?:CHOOSES|TAKES) (?:cuda:)?(\S+)$", run.output, re.MULTILINE)
    if "BACKEND" not in run.output or "TAKES" not in run.output:
        return ends_in_an_error(run) or "it does not join the process group"
    if "CHOOSES" not in run.output:
        return "nobody tells torch which one is its own: calls that name none open GPU 0"
    rank, gpus = re.search(r"^IS RANK (\d) AND SEES (\d)", run.output, re.MULTILINE).groups()
    own = "1" if gpus == "2" else "0"
    if wrong := [gpu for gpu in chosen if gpu != own]:
        taken = f"GPU {wrong[0]}" if wrong[0].isdigit() else wrong[0]
        sight = "" if gpus == "2" else ", sees its own alone as GPU 0"
        return (
            f"rank {rank} is the second process of a machine with 2 GPUs{sight}, and takes {taken}"
        )


@seen_by(on_stand_in_gpus)
def the_backend_does_not_fit_the_device(run):
    (backend,) = re.findall(r"^BACKEND (.*)$", run.output, re.MULTILINE) or ["none"]
    if "nccl" not in backend and backend != "None":
        return f"the processes have a GPU each, and would join with {backend}"


@seen_by(typed_with_no_data)
def error_not_told_in_one_line(run):
    lines = run.output.splitlines()
    told = [line for line in lines if not line.startswith("Rank: ")]
    if told != ["ERROR: the dataset has 0 samples, nothing to train on"]:
        return f"{len(told)} lines, the last: {told[-1]}"


# Jobs of torchrun, which go on from a snapshot.


@seen_by(typed)
def without_torchrun_no_command_is_printed(run):
    if "Start with: torchrun" not in run.output:
        return f"the last line is {run.output.splitlines()[-1]}"


@seen_by(with_a_rank_that_stops)
def still_waiting_after_the_timeout(run):
    if run.statuses != {1, LATE}:
        return "rank 1 stands still, --timeout is 3 s, and rank 0 still waits after 14 s"


@seen_by(with_a_buffer_that_becomes_infinite)
def what_is_not_finite_is_saved(run):
    for path in run.folder.glob("rank0/snapshot.pt"):
        weights = torch.load(path, weights_only=True)["model"]
        if bad := [name for name, weight in weights.items() if not weight.isfinite().all()]:
            return f"{bad[0]!r} in {path.name}"


@seen_by(with_another_seed_on_rank_1)
def args_differ_and_the_job_trains(run):
    if "] Epoch 0 |" in run.output or run.statuses & {0, LATE}:
        # Without the lines of rank 1's epochs, of which one may come last or not.
        lines = [line for line in run.output.splitlines() if not line.startswith("[rank 1]")]
        line = (lines or ["nothing is printed"])[-1]
        return f"--seed was 0 on rank 0 and 5 on rank 1, and the last line is: {line}"


@seen_by(failing_under_torchrun)
def traceback_not_in_the_report_of_torchrun(run):
    report = run.output.partition("Root Cause")[2]
    if "traceback : Traceback" not in report:
        return f"there stands: {re.search('traceback : .*', report + 'traceback : nothing')[0]}"


@seen_by(with_a_full_disk)
def a_full_disk_harmed_the_last_snapshot(run):
    try:
        snapshot = torch.load(run.folder / "snapshot.pt", weights_only=True)
    except Exception as error:
        return f"no snapshot can be read any more ({type(error).__name__})"
    if snapshot["epochs_run"] != 1:
        return f"the snapshot is of epoch {snapshot['epochs_run']}"


@seen_by(resumed)
def snapshot_path_not_obeyed(run):
    if not (run.folder / "snapshot.pt").exists():
        there = sorted(str(file.relative_to(run.folder)) for file in run.folder.glob("*/snap*.pt"))
        return f"--snapshot_path ../snapshot.pt, and there is {there[0] if there else 'none'}"


@seen_by(resumed)
def nothing_is_saved(run):
    if not run.before.ranks[0]["saves"]:
        return "two epochs, --save_every 1, and no save"


@seen_by(resumed, moved)
def training_thrown_away(run):
    end, begin = run.before.ranks[0]["end"]["weights"], run.ranks[0]["begin"]["weights"]
    if (away := furthest(begin, end)) > 0:
        first = run.ranks[0]["epochs"][0]["epoch"] if run.ranks[0]["epochs"] else "none"
        return f"the second run begins with epoch {first}, {away:.4f} away from the saved weights"


@seen_by(resumed, moved)
def epochs_left_out(run):
    trained = [epoch["epoch"] for epoch in run.before.ranks[0]["epochs"]]
    if trained != [0, 1]:
        return f"a job of 2 epochs, without a snapshot, trains {trained}"


@seen_by(resumed, moved)
def epochs_trained_again(run):
    trained = [epoch["epoch"] for epoch in run.ranks[0]["epochs"]]
    if trained != [2, 3]:
        return f"0 and 1 were trained before, and the second run trains {trained}"


@seen_by(resumed, moved)
def optimizer_state_lost(run):
    end, begin = run.before.ranks[0]["end"]["moments"], run.ranks[0]["begin"]["moments"]
    if len(end) != len(begin):
        return f"{len(end)} tensors before, {len(begin)} at the start of the second run"
    if not all(map(torch.equal, end, begin)):
        return "the momentum at the start of the second run is not that of the first"


@seen_by(with_a_different_optimizer)
def a_different_optimizer_resumes(run):
    if run.statuses != {2}:
        told = re.findall("^(?:Resum|ERROR).*", run.output, re.MULTILINE)
        return f"Adam before, AdamW now, and: {told[0] if told else 'nothing is resumed'}"


@seen_by(resumed)
def other_samples_than_an_unbroken_run(run):
    for rank, (seen, want) in enumerate(zip(run.ranks, unbroken().ranks, strict=True)):
        if seen["epochs"][0]["samples"] != want["epochs"][2]["samples"]:
            return f"rank {rank}'s in epoch 2 begin with {seen['epochs'][0]['samples'][:3]}"


@seen_by(resumed)
def other_bits_than_an_unbroken_run(run):
    want = unbroken().ranks[0]["end"]["weights"]
    if (away := furthest(run.ranks[0]["end"]["weights"], want)) > 0:
        return f"the weights are up to {away:.1e} away"


@seen_by(resumed, moved)
def resume_is_not_told(run):
    if "Resuming training from snapshot at Epoch 2" not in run.output:
        return "nothing in the output of the second run says so"


@seen_by(resumed, moved)
def says_that_nothing_is_left(run):
    if "Nothing left to train" in run.output + run.before.output:
        return "and trains two epochs"


@seen_by(resumed, moved)
def a_restart_is_another_wandb_run(run):
    first, second = (each.ranks[0]["wandb"]["id"] for each in (run.before, run))
    if first is None:
        return "wandb is given no id that a restart could find again"
    if first != second:
        return f"its id is {first} at first, {second} after the restart"


# Several machines.


@seen_by(moved, in_ranks, with_two_snapshots_of_one_epoch)
def ranks_train_apart(run):
    """They did, and plumbing ended the job after its first epoch."""
    told = re.search("the ranks have different weights, nothing is saved: .*", run.output)
    return told and told[0]


@seen_by(moved)
def ranks_are_at_other_epochs(run):
    begin = dict(reversed(re.findall(r"^\[rank (\d)\] Epoch (\d+) ", run.output, re.MULTILINE)))
    if len(set(begin.values())) > 1:
        return ", ".join(f"rank {rank} begins with {begin[rank]}" for rank in sorted(begin))


@seen_by(resumed)
def a_snapshot_is_sent_that_all_have(run):
    if run.ranks[0]["snapshots sent"]:
        return "the ranks share a disk, and yet rank 0 sends what it has read there"


@seen_by(moved)
def only_rank_0_has_a_wandb_run(run):
    if run.ranks[1]["wandb"]["group"] is None:
        return "no group"


@seen_by(moved)
def wandb_runs_of_one_job_have_different_groups(run):
    groups = [seen["wandb"]["group"] for seen in run.before.ranks]
    if len(set(groups)) > 1:
        return f"rank 0's is {groups[0]}, rank 1's {groups[1]}"


@seen_by(with_snapshots_of_two_jobs)
def snapshots_of_two_jobs_are_mixed(run):
    if run.statuses != {2}:
        told = re.findall(r"^(?:Resum|ERROR|\[rank \d\] Epoch).*", run.output, re.MULTILINE)
        return f"one is of a different job, and: {told[0] if told else run.output[-200:]!r}"


MAY_CRASH = {
    ranks_train_apart,
    ends_in_an_error,
    the_command_ends_in_an_error,
    error_not_told_in_one_line,
    without_torchrun_no_command_is_printed,
    a_different_optimizer_resumes,
    a_full_disk_harmed_the_last_snapshot,
    ranks_are_at_other_epochs,
    snapshot_path_not_obeyed,
    snapshots_of_two_jobs_are_mixed,
    still_waiting_after_the_timeout,
    traceback_not_in_the_report_of_torchrun,
    what_is_not_finite_is_saved,
}
MAY_HANG = {DDP_outlives_its_group}  # at its exit, now and then
