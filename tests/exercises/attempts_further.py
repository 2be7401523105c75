"""What the exercises of further.py have to say, of what they hand out and of wrong cures."""

SHARE = "share = range(rank, len(dataset), world_size)"
PADDED = "share = DistributedSampler(dataset, shuffle=False)"
SYNC = "        moments = dist.nn.functional.all_reduce(moments) / world_size\n"
SET = "torch.set_num_threads(max(1, os.cpu_count() // processes))"
WITH = "with nullcontext() if is_last else model.no_sync():\n"
FORWARD = "            loss = F.cross_entropy(model(source), targets)\n"

ATTEMPTS = {
    "accumulation": {
        "says": "Gradients are sent 20 times in 5 steps",
        "cures": [
            (
                (WITH, "if True:\n            model.require_backward_grad_sync = is_last\n"),
                ("(loss / MICRO_BATCHES)", "(loss * len(source) / len(share))"),
            ),
            ((WITH, "if True:\n            net = model if is_last else model.module\n"),)
            + ((FORWARD, FORWARD.replace("model(", "net(")),),
        ],
        "wrong": [
            (
                (("loss / MICRO_BATCHES", "loss"),),
                "away from those of one process that takes each batch at once",
            ),
            (
                ((WITH, "with model.no_sync():\n"),),
                "apart: gradients are sent 0 times in 5 steps",
            ),
            (  # the forward pass is not in it
                (
                    (FORWARD, ""),
                    (
                        "        " + WITH,
                        FORWARD[4:] + "        " + WITH,
                    ),
                ),
                "Gradients are sent 20 times",
            ),
        ],
    },
    "validation": {
        "says": "rank 0 has samples 102.0, right is 100",
        "cures": [
            (
                (SHARE, ""),
                ("sampler=share", "sampler=list(range(len(dataset)))[rank::world_size]"),
            ),
            (  # rank 0 alone, and slowly
                (SHARE, "share = range(len(dataset)) if rank == 0 else []"),
            ),
        ],
        "wrong": [
            (
                ((SHARE, PADDED.replace("shuffle=False", "shuffle=False, drop_last=True")),),
                "rank 0 has samples 99.0, right is 100",
            ),
            (
                (
                    (SHARE, PADDED),
                    ("dist.all_reduce(totals)\n", "dist.all_reduce(totals)\ntotals[2] = 100\n"),
                ),
                "rank 0 has a loss of",
            ),
        ],
    },
    "batchnorm": {
        "says": "outputs differ at once",
        "cures": [
            ((SYNC, ""), ("BatchNorm(),", "torch.nn.GroupNorm(1, 32),")),
            ((SYNC, ""), ("BatchNorm(),", "torch.nn.LayerNorm(32),")),
        ],
        "wrong": [
            (
                (
                    (
                        SYNC,
                        "        dist.all_reduce(moments)\n        moments /= world_size\n",
                    ),
                ),
                "outputs are equal at first, but not the gradients",
            ),
            (((SYNC, ""), ("BatchNorm(),", "torch.nn.Identity(),")), "does anything normalise?"),
        ],
    },
    "threads": {
        "says": "2 processes on 8 cores run 8 + 8 threads",
        "cures": [
            ((SET, "torch.set_num_threads(1 + (len(os.sched_getaffinity(0)) - 1) // processes)"),),
            (
                (SET, ""),
                (
                    "import torch\n",
                    "share = max(1, os.cpu_count() // int(os.environ['LOCAL_WORLD_SIZE']))\n"
                    "os.environ['OMP_NUM_THREADS'] = str(share)\nimport torch\n",
                ),
            ),
        ],
        "wrong": [
            (((SET, "torch.set_num_threads(1)"),), "run 1 + 1 threads and leave cores idle"),
            (((SET, "os.environ['OMP_NUM_THREADS'] = '4'"),), "run 8 + 8 threads"),
            (
                ((SET, "torch.set_num_threads(os.cpu_count() // processes)"),),
                "With 3 processes on 2 cores: Rank 0 ends",
            ),
            (((SET, "torch.set_num_threads(4)"),), "3 processes on 2 cores run 4 + 4 + 4"),
        ],
    },
}
