"""Exercises on multinode.py: several machines, each with a disk of its own."""

from exercises import checks, ways
from exercises.exercise import OWN, TORCHRUN, Exercise, first_complaint
from exercises.ranks import ROOT
from exercises.ways import observed

SCRIPT = "multinode.py"


def newest_of_all_machines():
    """The statements of multinode.py that choose a snapshot, as they stand there."""
    text = (ROOT / SCRIPT).read_text()
    begin = text.index("        # Each machine may have its own disk")
    return text[begin : text.index("        if snapshot is not None:", begin)]


def on_two_machines(script, folder):
    """Two machines with one process each: both are local rank 0."""
    return observed(script, folder, 3, 2, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


MOVED = (
    checks.ranks_are_at_other_epochs,
    (checks.ends_in_an_error, ways.moved),
    (checks.training_thrown_away, ways.moved),
    (checks.epochs_trained_again, ways.moved),
    (checks.optimizer_state_lost, ways.moved),
    (checks.ends_in_an_error, ways.stayed),
    (checks.training_thrown_away, ways.stayed),
)

EXERCISES = [
    Exercise(
        "two_disks",
        """Two machines have a disk each, and only one of them has the snapshot. After a restart
        each rank goes on from what it finds, so one begins with epoch 0 while the other is at epoch
        2. Let all ranks go on from the snapshot that is there.""",
        SCRIPT,
        ((newest_of_all_machines(), ""),),
        first_complaint(*MOVED),
        "Ask all ranks how far they are (all_gather_object), then let one that has the newest "
        "snapshot send it to all (plumbing.all_broadcast_snapshot)",
        "README.md#rank-0-may-be-on-any-node",
        start=TORCHRUN,
        arguments=OWN,
    ),
    Exercise(
        "moved_rank",
        """Rank 0 sends its snapshot to all ranks. But at a restart the machines may be numbered
        otherwise, and then rank 0 is on a machine that has none: hours of training are thrown away.
        Let the snapshot come from whoever has it.""",
        SCRIPT,
        (
            (
                newest_of_all_machines(),
                "        snapshot = plumbing.all_broadcast_snapshot(snapshot, src=0)\n",
            ),
        ),
        first_complaint(*MOVED),
        "Which rank has the newest snapshot? Each has to know before the broadcast: it names its "
        "source",
        "README.md#rank-0-may-be-on-any-node",
        start=TORCHRUN,
        arguments=OWN,
    ),
    Exercise(
        "arguments",
        """On one machine somebody typed another --seed, and the job trains on without a word, each
        rank with its own order of samples: some are seen twice, some never. End the job before the
        first epoch if the arguments are not the same on all ranks.""",
        SCRIPT,
        (
            (
                "    plumbing.all_exit_if_args_bad(args)  # all ranks exit together, so that none "
                "waits\n",
                "",
            ),
        ),
        first_complaint(
            (checks.ends_in_an_error, ways.moved), checks.args_differ_and_the_job_trains
        ),
        "Every rank has to know the arguments of every other (all_gather_object). plumbing/ has "
        "a function for it",
        "docs/plumbing.md",
        start=TORCHRUN,
        arguments=OWN,
    ),
    Exercise(
        "local_rank",
        """The script works on one machine. On two, both machines write the snapshot, into one file
        if they share a disk, and both draw the same dropout. The number that each process has is
        the wrong one: mend it.""",
        SCRIPT,
        (("self.rank = dist.get_rank()", 'self.rank = int(os.environ["LOCAL_RANK"])'),),
        first_complaint(
            (checks.ends_in_an_error, on_two_machines),
            (checks.two_writers_of_one_file, on_two_machines),
            (checks.dropout_equal_on_ranks, on_two_machines),
        ),
        "There is a local rank 0 on every machine, and one rank 0 in the job",
        "README.md#torchrun-starts-the-processes",
        start=TORCHRUN,
        arguments=OWN,
    ),
]
