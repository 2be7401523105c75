"""Measure train_llm.py beside what people would use instead, in one run on one GPU.

Run:  python benchmarks/peers.py

The same everywhere: GPT-2's architecture (124M), 64 sequences of 1024 random tokens in a batch, 4
batches in a step, bfloat16, torch.compile, fused AdamW, clipping, no dropout. Each row is a process
of its own, and the rows take turns.

script     the steps of train_llm.py, and a bare loop around its model (llm_speed.py)
nano       a bare loop around 40 lines of plain PyTorch (llm_speed.py)
plain      a bare loop around transformers' GPT-2 as it comes (llm_speed.py)
trainer    transformers' GPT-2 by the Trainer of transformers (which needs accelerate)
lightning  transformers' GPT-2 by the Trainer of Lightning

What is not installed is left out, and told. The last lines have the median of each, and how many
times as fast train_llm.py is; the picture has the same medians.
"""

import argparse
import importlib.util
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import llm_speed
import torch
from llm_speed import ACCUMULATION, run
from torch.utils.data import Dataset

LABELS = {
    "script": "train_llm.py",
    "bare": "its model in a bare loop",
    "nano": "40 lines of plain PyTorch",
    "plain": "transformers' GPT-2 in a bare loop",
    "trainer": "transformers' Trainer",
    "lightning": "Lightning's Trainer",
}
NEEDS = {"trainer": ("transformers", "accelerate"), "lightning": ("transformers", "lightning")}
ROWS = ("script", "nano", "plain", *NEEDS)
WARM_UP, BLOCK, BLOCKS = 8, 16, 4  # steps, steps, blocks of steps


class RandomTokens(Dataset):
    """Twice the batches of a step, again and again."""

    def __init__(self, batch_size):
        self.rows = torch.randint(0, 50257, (2 * ACCUMULATION * batch_size, llm_speed.LENGTH))

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        row = self.rows[index % len(self.rows)]
        return {"input_ids": row, "labels": row}


class Clock:
    """To be told of each step; knows the tokens/s of each block of steps after the warm-up."""

    def __init__(self, batch_size):
        self.tokens = BLOCK * ACCUMULATION * batch_size * llm_speed.LENGTH
        self.steps, self.begin, self.speeds = 0, 0.0, []

    def step(self):
        self.steps += 1
        if self.steps >= WARM_UP and (self.steps - WARM_UP) % BLOCK == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self.begin:
                self.speeds.append(self.tokens / (now - self.begin))
            self.begin = now


def gpt2(folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder / "gpt2")
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config)


def by_trainer(folder, batch_size, clock):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TellClock(TrainerCallback):
        def on_step_end(self, *args, **options):
            clock.step()

    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=WARM_UP + BLOCK * BLOCKS,
        bf16=on_gpu,
        torch_compile=on_gpu,
        optim="adamw_torch_fused",
        learning_rate=6e-4,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = RandomTokens(batch_size)
    Trainer(gpt2(folder), arguments, train_dataset=data, callbacks=[TellClock()]).train()


def by_lightning(folder, batch_size, clock):
    import lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = gpt2(folder)
            if torch.cuda.is_available():
                self.model.compile()

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)

        def configure_gradient_clipping(self, optimizer, *args, **options):
            # With mixed precision Lightning's own clipping refuses a fused optimizer.
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

        def on_train_batch_end(self, outputs, batch, index):
            if (index + 1) % ACCUMULATION == 0:
                clock.step()

    trainer = lightning.Trainer(
        max_steps=WARM_UP + BLOCK * BLOCKS,
        accumulate_grad_batches=ACCUMULATION,
        precision="bf16-mixed",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    on_gpu = torch.cuda.is_available()
    trainer.fit(Module(), DataLoader(RandomTokens(batch_size), batch_size, pin_memory=on_gpu))


def one_row(name, folder):
    batch_size = llm_speed.SIZES["gpt2"][3]
    clock = Clock(batch_size)
    {"trainer": by_trainer, "lightning": by_lightning}[name](folder, batch_size, clock)
    where = f"{name}: gpt2, 1 GPU, accumulation {ACCUMULATION}"
    llm_speed.print_speed(where, clock.speeds, math.nan)


def measure(row, folder) -> dict[str, float]:
    """Tokens/s by label, of a process that makes this row."""
    if row in NEEDS:
        command = [sys.executable, __file__, "--row", row, "--folder", folder]
    else:
        child = ["--child", row, "--folder", folder, "--rounds", BLOCKS]
        command = [sys.executable, llm_speed.__file__, *child, "--size", "gpt2"]
    speeds = run(command, CUDA_VISIBLE_DEVICES="0").items()
    return {label: speed for (label, batches), speed in speeds if batches == ACCUMULATION}


def missing(name):
    """The packages of a row that are not installed."""
    return [each for each in NEEDS.get(name, ()) if importlib.util.find_spec(each) is None]


def draw(path, medians):
    """A bar for each, the quickest on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.7 + 0.5 * len(medians)), layout="constrained")
    axes = figure.subplots()
    names = sorted(medians, key=medians.get)
    colors = ["#1f4e9e" if name == "script" else "#9db4d8" for name in names]
    bars = axes.barh(
        [LABELS[name] for name in names], [medians[name] for name in names], color=colors
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.margins(x=0.12)
    axes.set_xlabel("tokens/s on one GPU")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.savefig(path, dpi=110)


def main():
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **layout)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, help="some rows")
    parser.add_argument("--turns", type=int, default=2, help="of all rows (2)")
    parser.add_argument("--picture", help="a file to draw into")
    parser.add_argument("--row", choices=NEEDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        return one_row(args.row, Path(args.folder))
    rows = [name for name in args.only if not missing(name)]
    for name in args.only:
        if name not in rows:
            print(f"{name:10} left out: not installed: {' '.join(missing(name))}", flush=True)
    speeds, failed = {}, set()
    with tempfile.TemporaryDirectory() as name:
        llm_speed.prepare(Path(name))
        for row in args.turns * rows:
            try:
                found = measure(row, name)
            except subprocess.CalledProcessError:
                failed.add(row)
                continue
            for label, speed in found.items():
                speeds.setdefault(label, []).append(speed)
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name in sorted(medians, key=medians.get, reverse=True):
        times = f"  {medians['script'] / medians[name]:.2f}" if "script" in medians else ""
        print(f"{LABELS[name]:34} {medians[name]:9,.0f} tokens/s{times}")
    if args.picture:
        draw(args.picture, medians)
    if failed:
        sys.exit(
            f"Failed, and is not in the medians: {', '.join(sorted(failed))}. Why stands above"
        )


if __name__ == "__main__":
    main()
