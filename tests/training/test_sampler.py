"""training/sampler.py: the same samples in a step on any number of processes."""

import itertools

from training import sampler


def test_every_sequence_is_seen_once_in_an_epoch_on_any_number_of_ranks(monkeypatch):
    """What the ranks read together in a step depends on seed, step and global batch size alone."""
    length, together = 133, 12

    def read(seed, world_size, first_step, steps):
        seen = [[] for _ in range(steps)]
        monkeypatch.setattr(sampler.dist, "get_world_size", lambda: world_size)
        for rank in range(world_size):
            monkeypatch.setattr(sampler.dist, "get_rank", lambda rank=rank: rank)
            one = sampler.StepSampler(length, 2, together, seed)
            one.first_step = first_step
            batches = iter(one)
            for step in range(steps):
                for _ in range(one.accumulation(first_step + step)):
                    batch = next(batches)
                    assert len(batch) == 2
                    seen[step] += [index for index in batch if index >= 0]
        return seen

    seen = read(0, 1, 0, 24)
    epochs = [sorted(itertools.chain(*seen[:12])), sorted(itertools.chain(*seen[12:]))]
    assert epochs == [list(range(length))] * 2
    assert seen[:12] != seen[12:] and seen != read(1, 1, 0, 24)
    for world_size, first_step in [(2, 0), (3, 5), (6, 11), (1, 13)]:
        again = read(0, world_size, first_step, 24 - first_step)
        assert list(map(sorted, again)) == list(map(sorted, seen[first_step:]))
