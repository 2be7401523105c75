"""Exercises on multigpu_torchrun.py: a launcher, a snapshot, and going on after a failure."""

from exercises import checks, ways
from exercises.checks import seen_by
from exercises.exercise import OWN, TORCHRUN, Exercise, first_complaint

SCRIPT = "multigpu_torchrun.py"


@seen_by(ways.resumed)
def learning_rate_is_not_that_of_an_unbroken_run(run):
    """That one halves it after each of four epochs."""
    (rate,), want = run.ranks[0]["end"]["rates"], 0.05 * 0.5**4
    if abs(rate - want) > 1e-9:
        return f"{rate:.6f} after four epochs, in an unbroken run {want:.6f}"


ENDS_WELL = (checks.ends_in_an_error, ways.resumed)
RESUME = (
    ENDS_WELL,
    checks.nothing_is_saved,
    checks.epochs_left_out,
    checks.epochs_trained_again,
    checks.training_thrown_away,
    checks.optimizer_state_lost,
    checks.other_samples_than_an_unbroken_run,
    checks.other_bits_than_an_unbroken_run,
)

SCHEDULE = (
    (
        "class Trainer:\n",
        "def halve(epoch):\n"
        '    """What the learning rate is multiplied with after so many epochs."""\n'
        "    return 0.5**epoch\n\n\n"
        "class Trainer:\n",
    ),
    (
        "        self.epochs_run = 0\n",
        "        self.epochs_run = 0\n"
        "        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halve)\n",
    ),
    (
        '            "optimizer": self.optimizer.state_dict(),\n',
        '            "optimizer": self.optimizer.state_dict(),\n'
        '            "scheduler": self.scheduler.state_dict(),\n',
    ),
    (
        '        self.optimizer.load_state_dict(snapshot["optimizer"])\n',
        '        self.optimizer.load_state_dict(snapshot["optimizer"])\n'
        '        self.scheduler.load_state_dict(snapshot["scheduler"])\n',
    ),
    (
        "            self._run_epoch(epoch)\n",
        "            self._run_epoch(epoch)\n            self.scheduler.step()\n",
    ),
)

EXERCISES = [
    Exercise(
        "device",
        """Every process of a machine takes GPU 0, which holds the memory of all while the others
        stand idle. Let each take its own: torchrun tells a process its number on its machine. (The
        check does without GPUs: it looks at the numbers.)""",
        SCRIPT,
        (('int(os.environ["LOCAL_RANK"])', "0"),),
        first_complaint(checks.a_process_takes_a_GPU_that_is_not_its_own),
        "RANK counts through the whole job, LOCAL_RANK on each machine anew. A GPU's number is one "
        "of its machine",
        "README.md#torchrun-starts-the-processes",
        start=TORCHRUN,
        arguments=OWN,
    ),
    Exercise(
        "momentum",
        """After a restart the loss is a little higher than without one: the optimizer begins with
        no momentum, though the snapshot has it. Let a resumed run end with the same weights as an
        unbroken one.""",
        SCRIPT,
        (('        self.optimizer.load_state_dict(snapshot["optimizer"])\n', ""),),
        first_complaint(*RESUME),
        "The snapshot has the optimizer's state. What does _resume do with it?",
        "README.md#a-snapshot-holds-all-that-a-restart-needs",
        start=TORCHRUN,
        arguments=OWN,
    ),
    Exercise(
        "epoch",
        """After a restart the last epoch that was saved is trained once more. Make the resumed run
        go on with the next one.""",
        SCRIPT,
        (('"epochs_run": epoch + 1,', '"epochs_run": epoch,'),),
        first_complaint(*RESUME),
        "When epoch 1 is saved, how many epochs have been run?",
        "README.md#the-resume",
        start=TORCHRUN,
        arguments=OWN,
    ),
    Exercise(
        "tear",
        """If the disk is full, or the job is killed in the middle of a save, the old snapshot is
        overwritten and the new one is not whole. Save so that one of them is there and whole at any
        time.""",
        SCRIPT,
        (
            (
                "plumbing.save_atomically(snapshot, self.snapshot_path)",
                "torch.save(snapshot, self.snapshot_path)",
            ),
        ),
        first_complaint(ENDS_WELL, checks.a_full_disk_harmed_the_last_snapshot, *RESUME),
        "Write to another name beside it; only a file that is complete takes the place of the old "
        "one, by a rename. plumbing/ has that as a function",
        "docs/plumbing.md",
        start=TORCHRUN,
        arguments=OWN,
    ),
    Exercise(
        "anew",
        """Snapshots are saved, and every restart begins at epoch 0 all the same. Go on from the
        snapshot, if there is one.""",
        SCRIPT,
        (
            (
                "        self._load_snapshot()  # before DDP, which puts `module.` before the name "
                "of each weight\n",
                "",
            ),
        ),
        first_complaint(*RESUME),
        "The method is there, and nobody calls it. Which names have the weights in the file, and "
        "which ones once DDP is around the model?",
        "README.md#the-resume",
        start=TORCHRUN,
        arguments=OWN,
    ),
    Exercise(
        "schedule",
        """This script halves the learning rate after each epoch. After a restart the rate rises
        again, since the schedule believes that it is at its beginning. Make it go on.""",
        SCRIPT,
        (
            ('            "scheduler": self.scheduler.state_dict(),\n', ""),
            ('        self.scheduler.load_state_dict(snapshot["scheduler"])\n', ""),
        ),
        first_complaint(
            *RESUME[:5], learning_rate_is_not_that_of_an_unbroken_run, checks.optimizer_state_lost
        ),
        "What changes while you train belongs in the snapshot, and has to be put back",
        "docs/your-own.md#a-learning-rate-schedule",
        recipe=SCHEDULE,
        start=TORCHRUN,
        arguments=OWN,
    ),
]
