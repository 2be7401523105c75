"""Measure train_translation.py beside a bare loop around the same model, in turns, in one process.

Run:  python benchmarks/translation_speed.py --batch_size 256
      torchrun --standalone --nproc_per_node=2 benchmarks/translation_speed.py --batch_size 256

Takes the options of train_translation.py. The script's steps have all that belongs to them (data,
DDP, agreement, report). The bare loop has the same compiled model, loss and optimizer, and batches
of the same pairs that lie on the device already. What a GPU does once for each pair of lengths
(it records a CUDA graph) is done before the turns.
"""

import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
from llm_speed import seconds

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

ROUNDS, STEPS, WARM_UP = 9, 60, 60


def build(folder):
    import train_translation

    with redirect_stdout(sys.stderr):
        args = train_translation.parse_args()
        if os.path.exists(args.dataset):
            args.dataset = os.path.abspath(args.dataset)
        os.chdir(folder)
        args.log_freq, args.max_steps = 50, 1_000_000
        trainer = train_translation.build_trainer(args)
    if trainer.sampler.accumulation(0) > 1:
        sys.exit("One batch makes a step here: give a smaller --batch_size, no --global-batch-size")
    trainer.signals.number = 0
    trainer.log.write = lambda line: None
    trainer.batches = iter(trainer.train_data)
    return trainer


def script(trainer, first, steps):
    """As in Trainer.train."""
    for step in range(first, first + steps):
        trainer._run_step(step)
        trainer.steps_run = step + 1
        trainer.log.bar.update()
        trainer._agree()
        if trainer.steps_run % trainer.args.log_freq == 0:
            trainer._problem_with_gradients()
            trainer._report()


def batches_of(trainer, first):
    """The batches of these steps as the script would make them, on the device."""
    dataset, sampler, found = trainer.train_data.dataset, trainer.sampler, []
    sampler.first_step = first
    for step, rows in zip(range(first, first + STEPS), sampler, strict=False):
        batch = [each.to(trainer.device) for each in dataset.__getitems__(rows)]
        found.append((batch, trainer._targets_in_step(step)))
    return found


def bare(trainer, batches, model):
    from train_translation import PAD, loss_sum

    optimizer, args = trainer.optimizer, trainer.args
    for (source, inputs, labels), targets in batches:
        with torch.autocast(trainer.device.type, torch.bfloat16, args.dtype == "bfloat16"):
            logits = model(source, inputs)
        (loss_sum(logits, labels, PAD, args.label_smoothing) / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def try_lengths(trainer, batches, seen):
    """Three steps with each pair of lengths that is not in `seen`. They send no gradients, since
    other ranks may have other lengths here. Weights then differ between ranks: speed does not."""
    for batch in batches:
        lengths = tuple(each.shape for each in batch[0])
        if lengths not in seen:
            seen.add(lengths)
            bare(trainer, [batch] * 3, trainer.model.module)


def main():
    if {"-h", "--help"} & set(sys.argv):
        return print(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(folder)
        begin = time.perf_counter()
        # On several GPUs the bare loop has to send gradients too, and does that as the script does.
        model = trainer.model if dist.get_world_size() > 1 else trainer.model.module
        script(trainer, 0, WARM_UP)
        bare(trainer, batches_of(trainer, WARM_UP), model)
        warm_up = time.perf_counter() - begin
        speeds, seen = {"script": [], "bare": []}, set()
        for turn in range(ROUNDS):
            first = WARM_UP + turn * STEPS
            batches = batches_of(trainer, first)
            try_lengths(trainer, batches, seen)
            targets = sum(count for _, count in batches) / dist.get_world_size()
            speeds["script"].append(targets / seconds(script, trainer, first, STEPS))
            speeds["bare"].append(targets / seconds(bare, trainer, batches, model))
        if trainer.rank == 0:
            print(f"torch {torch.__version__}, {dist.get_world_size()} x", end=" ")
            print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", end="")
            print(f", the first steps and compiling took {warm_up:.0f} s")
            for name, found in speeds.items():
                rounds = ", ".join(f"{each:,.0f}" for each in found)
                print(f"{name:6} {statistics.median(found):9,.0f} target tokens/s a GPU ({rounds})")
            print(f"script : bare {ratio(speeds):.3f}")
        del trainer, model  # DDP has to go before the group that it talks through
        dist.destroy_process_group()


def ratio(speeds):
    """The median of the turns: each compares neighbours in time, on the same pairs."""
    turns = zip(speeds["script"], speeds["bare"], strict=True)
    return statistics.median(script / bare for script, bare in turns)


if __name__ == "__main__":
    main()
