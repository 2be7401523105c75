"""Exercises on multigpu.py: from one process to several."""

from exercises import checks
from exercises.exercise import Exercise, first_complaint

ASKED = (
    checks.DDP_outlives_its_group,  # before all else, since it may then hang at its end
    checks.ends_in_an_error,
    checks.ranks_saw_the_same_samples,
    checks.epoch_repeated,
    checks.dropout_equal_on_ranks,
    checks.ranks_hold_other_weights,
    checks.weights_differ_from_one_process,
    checks.loss_is_that_of_one_rank,
    checks.two_writers_of_one_file,
    checks.keys_with_module,
    checks.group_is_left,
)
CHECK = first_complaint(*ASKED)
WITH_BACKEND = first_complaint(*ASKED, checks.the_backend_does_not_fit_the_device)

EXERCISES = [
    Exercise(
        "group",
        """Two processes are started, but they do not know of each other: nobody has joined the
        process group. Let them join, with the backend that fits the device.""",
        "multigpu.py",
        (
            (
                "    dist.init_process_group(backend, init_method, rank=rank, "
                "world_size=world_size)\n",
                "",
            ),
        ),
        WITH_BACKEND,
        "One call of torch.distributed, in ddp_setup: it needs the place to meet, the rank and the "
        "world size, which ddp_setup is given",
        "README.md#join-a-process-group",
    ),
    Exercise(
        "wrap",
        """Each process trains a model of its own: no gradient is exchanged, and the models drift
        apart. Wrap the model so that backward() averages the gradients. Look at what the saved
        names are then.""",
        "multigpu.py",
        (
            (
                "        # Copies rank 0's weights to every rank. backward() will now average the "
                "gradients.\n        self.model = DDP(self.model)\n",
                "",
            ),
            (
                "self.model.module.state_dict()  # module: the model without DDP around it",
                "self.model.state_dict()",
            ),
        ),
        CHECK,
        "DDP(model), once the model is on its device; the model itself is then the .module of it",
        "README.md#wrap-the-model-in-ddp",
    ),
    Exercise(
        "sampler",
        """Both processes work through the whole dataset, so twice the work is done in an epoch and
        each sample is seen twice. Give each process its own share. Shuffle it, too, anew in each
        epoch.""",
        "multigpu.py",
        (
            (
                "        sampler=DistributedSampler(dataset, seed=seed),  # shuffles, and takes "
                "this rank's share\n",
                "        shuffle=True,\n        generator=torch.Generator().manual_seed(seed),\n",
            ),
            (
                "        sampler = self.train_data.sampler\n"
                "        sampler.set_epoch(epoch)  # a new order in each epoch, the same on all "
                "ranks\n",
                "",
            ),
            (
                "sampler.seed + epoch * dist.get_world_size() + self.rank",
                "1000 * epoch + self.rank",
            ),
        ),
        CHECK,
        "A DistributedSampler shuffles and takes the share of its rank; DataLoader then must not "
        "shuffle. And it has to be told the epoch",
        "README.md#share-out-the-data",
    ),
    Exercise(
        "set_epoch",
        """The samples come in the same order in each epoch. Have them in a new order, the same
        one on all ranks, or two ranks would see one sample.""",
        "multigpu.py",
        (
            (
                "        sampler.set_epoch(epoch)  # a new order in each epoch, the same on all "
                "ranks\n",
                "",
            ),
        ),
        CHECK,
        "The sampler shuffles by its seed and the epoch. Who tells it the epoch?",
        "README.md#one-order-for-all-and-one-loss",
    ),
    Exercise(
        "loss",
        """Each rank prints a loss, and they differ: it is that of the rank's own samples. Make it
        the loss of the job, the same on all ranks and equal to that of one process.""",
        "multigpu.py",
        (
            (
                "        dist.all_reduce(totals)  # each rank now has the sums over all ranks: the "
                "job's loss\n",
                "",
            ),
        ),
        CHECK,
        "A sum over all ranks is a collective. It has to be made of the sums, before the division",
        "README.md#one-order-for-all-and-one-loss",
    ),
    Exercise(
        "writer",
        """All ranks write checkpoint.pt at the same time, and one may read or leave a mixture. Let
        one of them write.""",
        "multigpu.py",
        (
            (
                "        if self.rank != 0:\n"
                "            return  # all ranks have the same weights: one file, one writer\n",
                "",
            ),
        ),
        CHECK,
        "All ranks have the same weights, so any one of them can save. Rank 0 is always there",
        "README.md#one-rank-saves",
    ),
    Exercise(
        "module",
        """The checkpoint's names all begin with `module.`, so that a program without DDP cannot
        load it. Save the names of the model itself.""",
        "multigpu.py",
        (
            (
                "self.model.module.state_dict()  # module: the model without DDP around it",
                "self.model.state_dict()",
            ),
        ),
        CHECK,
        "DDP is a module around your model, which is its attribute `module`",
        "README.md#one-rank-saves",
    ),
    Exercise(
        "leave",
        """Training ends, and the ranks just stop: the process group is still there, and so is DDP,
        which uses it. That hangs now and then. Leave in the right order.""",
        "multigpu.py",
        (
            (
                "    del trainer  # a DDP model that outlives the group it uses can hang the exit\n"
                "    dist.destroy_process_group()  # closes the connections to the other ranks\n",
                "",
            ),
        ),
        CHECK,
        "Two lines: first what uses the group goes, then the group",
        "README.md#start-and-end",
    ),
    Exercise(
        "dropout",
        """A model with dropout drops the same units on each rank, so that the ranks' samples are
        less independent than they seem. Seed each rank otherwise, and yet so that a second run
        draws the same numbers.""",
        "multigpu.py",
        (
            (
                "torch.manual_seed(sampler.seed + epoch * dist.get_world_size() + self.rank)",
                "torch.manual_seed(sampler.seed + epoch)",
            ),
        ),
        CHECK,
        "The seed has to depend on the rank and on the epoch, and no two pairs may have the same",
        "README.md#one-order-for-all-and-one-loss",
    ),
]
