"""What the exercises of hangs.py have to say, of what they hand out and of wrong cures."""

LOOP = "    for source, targets in loader:\n"

ALL_WAIT = "The job stands still: all its ranks wait."

ATTEMPTS = {
    "one_rank_only": {
        "says": ALL_WAIT,
        "cures": [
            (
                ("loss = mean_over_ranks(loss)\nif rank", "dist.all_reduce(loss)\nif rank"),
                ('"loss": loss}', '"loss": loss.item() / 2}'),
            ),
        ],
        "wrong": [
            (
                (
                    ("loss = mean_over_ranks(loss)\nif rank", "if rank"),
                    ('"loss": loss}', '"loss": loss.item()}'),
                ),
                "a loss of 8.312, right is 16.188",
            ),
            (
                (
                    ("loss = mean_over_ranks(loss)\nif rank", "if rank"),
                    ('"loss": loss}', '"loss": mean_over_ranks(loss)}'),
                    ("dist.barrier()", "# dist.barrier()"),
                ),
                "Rank 1 ends at line 34 with FileNotFoundError",
            ),
        ],
    },
    "steps": {
        "says": ALL_WAIT,
        "cures": [
            (
                (
                    "share = DistributedSampler(dataset, shuffle=False)",
                    "share = range(rank, len(dataset) - 1, world_size)",
                ),
            ),
            (
                (
                    "share = DistributedSampler(dataset, shuffle=False)",
                    "from torch.distributed.algorithms.join import Join\n\n"
                    "share = range(rank, len(dataset), world_size)",
                ),
                (LOOP, "  with Join([model]):\n" + LOOP),
            ),
        ],
        "wrong": [
            (
                (
                    (
                        "share = DistributedSampler(dataset, shuffle=False)",
                        "share = range(rank, len(dataset), world_size)",
                    ),
                    ("model(source)", "model.module(source)"),
                ),
                "models of their own",
            ),
            (((LOOP, LOOP + "        if steps == 3: break\n"),), "3 and 3 steps in place of 8"),
        ],
    },
    "order": {
        "says": ALL_WAIT,
        "cures": [
            (
                (
                    "for name, value in sorted(values.items()):\n",
                    'for name in ["words", "version", "samples"]:\n    value = values[name]\n',
                ),
            ),
        ],
        "wrong": [
            (
                (("dist.broadcast(value, src=0)", "pass"),),
                "rank 1 has version 3.0, right is 7",
            ),
            (
                (
                    ("dist.broadcast(value, src=0)", "dist.all_reduce(value, dist.ReduceOp.MAX)"),
                    ("sorted(values.items())", "values.items()"),
                ),
                "rank 0 has samples",
            ),
        ],
    },
    "swallowed_error": {
        "says": ALL_WAIT,
        "cures": [
            ((' if word != "n/a"])', " if word[0].isdigit()])"),),
            (
                (
                    "        values = parse(record)\n",
                    "        words = [word for word in record.split() if word[0].isdigit()]\n"
                    "        values = torch.tensor(list(map(float, words)))\n",
                ),
            ),
        ],
        "wrong": [
            (((' if word != "n/a"])', "])"),), "Rank 1 ends at line 13 with ValueError: could not"),
            (
                (
                    (
                        "float(word) for word in record.split() if word",
                        "float(word.replace('n/a', '0')) for word in record.split() if word",
                    ),
                    ('!= "n/a"])', "])"),
                ),
                "a number of values of 12.0, right is 11",
            ),
            (
                (("        dist.all_reduce(batch)\n", ""),),
                "a number of values of 4.0, right is 11",
            ),
        ],
    },
    "lock": {
        "says": ALL_WAIT,
        "cures": [
            (
                ("threading.Lock()", "threading.RLock()"),
                ("        del self.", "        with self.lock:\n            del self."),
            ),
        ],
        "wrong": [
            (
                (("with self.lock:\n            if", "if True:\n            if"),),
                "changed while nobody holds its lock",
            ),
            (
                (("self.drop_oldest()", "pass"),),
                "rank 1 has a number of squares kept of 5.0, right is 3",
            ),
            (
                (
                    ("        del self.", "        with self.lock:\n            del self."),
                    ("dist.all_reduce(total)", "# dist.all_reduce(total)"),
                ),
                "rank 0 ended and rank 1 waits",
            ),
        ],
    },
}
