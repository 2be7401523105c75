"""What readers may try in the exercises on the ladder: other honest cures, and wrong ones.

All are edits of the solution. Of a wrong cure it is said what the check has to say.
"""

GATHERED = (
    "        dist.all_reduce(totals)  # each rank now has the sums over all ranks: the job's loss\n"
)
ADDED = "totals[0] += loss.float() * len(source)"
SAVE = "plumbing.save_atomically(snapshot, self.snapshot_path)"
LOAD = (
    "        self._load_snapshot()  # before DDP, which puts `module.` before the name of each "
    "weight\n"
)
MODULE = "self.model.module.state_dict()  # module: the model without DDP around it"
NEWEST = "snapshot = plumbing.all_broadcast_snapshot(snapshot, src=newest)"
BY_OBJECTS = """\
box = [snapshot]
            dist.broadcast_object_list(box, src=newest)
            snapshot = box[0]"""
SAMPLER = "sampler=DistributedSampler(dataset, seed=seed),"
SET_EPOCH = "        sampler.set_epoch(epoch)  # a new order in each epoch, the same on all ranks\n"
SEED = "torch.manual_seed(sampler.seed + epoch * dist.get_world_size() + self.rank)"
DUE = "if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:"
LAST = "\n\ndef load_train_objs"
LEAVE = (
    "    del trainer  # a DDP model that outlives the group it uses can hang the exit\n"
    "    dist.destroy_process_group()  # closes the connections to the other ranks\n"
)
ARGS = "plumbing.all_exit_if_args_bad(args)"
OWN_CHECK = """\
seeds = [None] * dist.get_world_size()
    dist.all_gather_object(seeds, vars(args))
    if any(each != seeds[0] for each in seeds):
        raise SystemExit("the arguments differ between the ranks")"""
BY_HAND = """\
torch.save(snapshot, "new.pt")
        os.replace("new.pt", self.snapshot_path)"""
IN_TRY = """\
try:
            torch.save(snapshot, self.snapshot_path)
        except Exception as error:
            print(error)"""

ATTEMPTS = {
    "wait": {
        "says": "7 times",
        "cures": [((ADDED, "totals[0] = totals[0] + len(source) * loss"),)],
        "wrong": [
            (((ADDED, "totals[0] += loss.tolist() * len(source)"),), "7 times"),
            (((ADDED, "totals[0] += loss.cpu() * len(source)"),), "7 times"),
            (((ADDED, "totals[0] += 0.5 * len(source)"),), "The loss is another"),
            (((ADDED, "totals[0] += float(loss) * len(source)"),), "7 times"),
        ],
    },
    "save": {
        "says": "saved after 1, 3, 5",
        "cures": [((DUE, "if epoch % self.save_every == 1 or epoch == total_epochs - 1:"),)],
        "wrong": [
            (
                (
                    (DUE, "if (epoch + 1) % self.save_every == 0:"),
                    (LAST, f"        self._save_checkpoint(epoch)\n{LAST}"),
                ),
                "A save comes twice",
            ),
            (((DUE, "if (epoch + 1) % self.save_every == 0:"),), "saved after 2, 4"),
        ],
    },
    "group": {
        "says": "process group has not been initialized",
        "cures": [
            (
                (
                    "backend, init_method, rank=rank, world_size=world_size",
                    '"nccl" if device.type == "cuda" else "gloo", init_method, rank=rank, '
                    "world_size=world_size",
                ),
            )
        ],
        "wrong": [
            (
                (("init_process_group(backend", 'init_process_group("gloo"'),),
                "would join with gloo",
            ),
            ((("world_size=world_size", "world_size=1"),), "rror"),
        ],
    },
    "wrap": {
        "says": "the ranks have different weights, nothing is saved",
        "cures": [
            (
                ("self.model = DDP(self.model)", "self.ddp = DDP(self.model)"),
                ("output = self.model(source)", "output = self.ddp(source)"),
                (MODULE, "self.model.state_dict()"),
            )
        ],
        "wrong": [(((MODULE, "self.model.state_dict()"),), "Keys with module")],
    },
    "sampler": {
        "says": "Ranks saw the same samples",
        "cures": [
            (
                (
                    SAMPLER,
                    "sampler=DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), "
                    "True, seed),",
                ),
            )
        ],
        "wrong": [
            (((SET_EPOCH, ""),), "Epoch repeated"),
            (((SAMPLER, "sampler=DistributedSampler(dataset, shuffle=False),"),), "Epoch repeated"),
        ],
    },
    "set_epoch": {
        "says": "Epoch repeated",
        "cures": [((SET_EPOCH, "        self.train_data.sampler.set_epoch(7 * epoch + 1)\n"),)],
        "wrong": [
            (
                ((SET_EPOCH, "        sampler.set_epoch(2 * epoch + self.rank)\n"),),
                "Ranks saw the same samples",
            ),
        ],
    },
    "loss": {
        "says": "Loss is that of one rank",
        "cures": [
            (
                (
                    GATHERED,
                    "        both = [torch.empty(2) for _ in range(dist.get_world_size())]\n"
                    "        dist.all_gather(both, totals)\n        totals = sum(both)\n",
                ),
            )
        ],
        "wrong": [
            (((GATHERED, "        dist.broadcast(totals, src=0)\n"),), "Loss is that of one rank"),
        ],
    },
    "writer": {
        "says": "rank0 and rank1",
        "cures": [
            (
                (
                    "        if self.rank != 0:\n"
                    "            return  # all ranks have the same weights: one file, one writer\n",
                    "",
                ),
                (
                    '        plumbing.save_atomically(weights, "checkpoint.pt")\n',
                    "        if self.rank == 0:\n"
                    '            torch.save(weights, "checkpoint.pt")\n',
                ),
            )
        ],
        "wrong": [
            (
                (("        if self.rank != 0:\n            r", "        if True:\n            r"),),
                "no rank",
            ),
        ],
    },
    "module": {
        "says": "'module.",
        "cures": [
            (
                (
                    MODULE,
                    '{k.removeprefix("module."): v for k, v in self.model.state_dict().items()}',
                ),
            )
        ],
        "wrong": [
            (
                ((MODULE, 'dict(self.model.state_dict(), **{"module.x": torch.ones(1)})'),),
                "'module.",
            ),
        ],
    },
    "leave": {
        "says": "Group is left",
        "cures": [((LEAVE, "    trainer.model = None\n    dist.destroy_process_group()\n"),)],
        "wrong": [(((LEAVE, "    dist.destroy_process_group()\n"),), "DDP outlives its group")],
    },
    "dropout": {
        "says": "Dropout equal on ranks",
        "cures": [((SEED, "torch.manual_seed(sampler.seed + 1000 * epoch + self.rank)"),)],
        "wrong": [(((SEED, "torch.manual_seed(sampler.seed)"),), "Dropout equal on ranks")],
    },
    "device": {
        "says": "takes GPU 0",
        "cures": [(('int(os.environ["LOCAL_RANK"])', "dist.get_node_local_rank()"),)],
        "wrong": [((('os.environ["LOCAL_RANK"]', 'os.environ["RANK"]'),), "takes GPU 0")],
    },
    "momentum": {
        "says": "Optimizer state lost",
        "cures": [
            (
                (
                    '        self.optimizer.load_state_dict(snapshot["optimizer"])\n',
                    '        state = snapshot["optimizer"]\n'
                    "        self.optimizer.load_state_dict(state)\n",
                ),
            )
        ],
        "wrong": [
            (
                (
                    (
                        'self.optimizer.load_state_dict(snapshot["optimizer"])',
                        "self.optimizer.load_state_dict(self.optimizer.state_dict())",
                    ),
                ),
                "Optimizer state lost",
            ),
            (  # the state alone, and not what belongs to it
                (
                    (
                        'self.optimizer.load_state_dict(snapshot["optimizer"])',
                        'self.optimizer.load_state_dict(snapshot["optimizer"])\n'
                        '        self.optimizer.param_groups[0]["momentum"] = 0.8',
                    ),
                ),
                "Other bits than an unbroken run",
            ),
        ],
    },
    "epoch": {
        "says": "trains [1, 2, 3]",
        "cures": [
            (
                ('"epochs_run": epoch + 1,', '"epochs_run": epoch,'),
                (
                    'self.epochs_run = snapshot["epochs_run"]',
                    'self.epochs_run = snapshot["epochs_run"] + 1',
                ),
                ("        plumbing.print_resume(snapshot, self.train_data)\n", ""),
            )
        ],
        "wrong": [
            (
                (
                    (
                        "range(self.epochs_run, total_epochs)",
                        "range(self.epochs_run + 1, total_epochs)",
                    ),
                ),
                "trains [1]",
            ),
            ((('"epochs_run": epoch + 1,', '"epochs_run": epoch + 2,'),), "trains [3]"),
        ],
    },
    "tear": {
        "says": "A full disk harmed the last snapshot",
        "cures": [(((SAVE, BY_HAND)),)],
        "wrong": [(((SAVE, IN_TRY),), "A full disk harmed the last snapshot")],
    },
    "anew": {
        "says": "trains [0, 1, 2, 3]",
        "cures": [((LOAD, "        self._load_snapshot()\n"),)],
        "wrong": [
            (
                (
                    (LOAD, ""),
                    (
                        "        self.model = DDP(self.model)\n",
                        "        self.model = DDP(self.model)\n        self._load_snapshot()\n",
                    ),
                ),
                "is of a different model",
            ),
        ],
    },
    "schedule": {
        "says": "0.012500 after four epochs, in an unbroken run 0.003125",
        "cures": [
            (
                ('            "scheduler": self.scheduler.state_dict(),\n', ""),
                (
                    'self.scheduler.load_state_dict(snapshot["scheduler"])',
                    'self.scheduler.last_epoch = snapshot["epochs_run"]',
                ),
            )
        ],
        "wrong": [
            (
                (("            self.scheduler.step()\n", ""),),
                "Learning rate is not that of an unbroken run",
            ),
        ],
    },
    "two_disks": {
        "says": "the ranks have different weights, nothing is saved",
        "cures": [
            ((NEWEST, BY_OBJECTS),),
            (("found.index(max(found))", "max(zip(found, range(9)))[1]"),),
        ],
        "wrong": [
            (((NEWEST, NEWEST.replace("newest", "1")),), "Training thrown away"),
            (((NEWEST, NEWEST.replace("newest", "0")),), "Training thrown away"),
            (
                (
                    (
                        "        # Each machine may have its own disk",
                        "        plumbing.all_exit_if_disks_differ(snapshot)\n        #",
                    ),
                ),
                "the snapshot is not the same on all machines",
            ),
        ],
    },
    "moved_rank": {
        "says": "Training thrown away",
        "cures": [
            ((NEWEST, BY_OBJECTS), ("found.index(max(found))", "max(zip(found, range(9)))[1]"))
        ],
        "wrong": [
            (((NEWEST, NEWEST.replace("newest", "1")),), "Training thrown away"),
            (
                ((NEWEST, "pass"),),
                "the ranks have different weights, nothing is saved",
            ),
        ],
    },
    "arguments": {
        "says": "Args differ and the job trains",
        "cures": [((ARGS, OWN_CHECK),)],
        "wrong": [(((ARGS, "print(args)"),), "Args differ and the job trains")],
    },
    "local_rank": {
        "says": "rank0 and rank1",
        "cures": [(("self.rank = dist.get_rank()", 'self.rank = int(os.environ["RANK"])'),)],
        "wrong": [
            (
                (
                    (
                        "self.rank = dist.get_rank()",
                        'self.rank = int(os.environ["LOCAL_RANK"]) + dist.get_rank() // 2',
                    ),
                ),
                "rank0 and rank1",
            ),
        ],
    },
}
