"""Measure train_llm.py on GPT-2's architecture, side by side with bare loops, in one run.

Run:  python benchmarks/llm_speed.py                      every row, on all GPUs of the machine
      python benchmarks/llm_speed.py --only bare script   some of them

Sequences of 1024 random tokens, 64 in a batch, 4 batches accumulated in a step, bfloat16. Rows take
turns, --rounds times; a row shows the median and, in brackets, all rounds. MFU is 6 N + 12 L H Q T
operations a token against the peak of the GPU (train_llm.flops_per_token and PEAK_TFLOPS).

nano     A bare loop around a model of 40 lines of plain PyTorch, torch.compile over model and loss.
plain    A bare loop around transformers' GPT-2 as it comes, torch.compile over model and loss.
bare     A bare loop around the compiled model, loss and optimizer of train_llm.py: no DDP, no data,
         no report.
script   train_llm.py itself, as its own log says: what it adds to `bare` is its overhead.
medium   The same with GPT-2 350M, 32 in a batch.
gpus     The same on all GPUs, with accumulation 4 and 1, against one GPU of the same machine.
save     Seconds that a step waits for a snapshot, against torch.save of the same state; the speed
         of the steps while the file is written; and reading it with and without mmap.
start    Seconds from the start of the script to its first step, with a cold and a warm cache.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LENGTH, ACCUMULATION = 1024, 4
SIZES = {"gpt2": (12, 768, 12, 64), "medium": (24, 1024, 16, 32)}  # layers, width, heads, batch
STEPS = 20


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in heads]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Nano(nn.Module):
    def __init__(self, layers, width, heads, vocab_size=50304):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)


def bare_loop(kind, size, folder):
    """Print tokens per second of a plain loop. Runs in a process of its own."""
    layers, width, heads, batch_size = SIZES[size]
    device = torch.device("cuda")
    torch.manual_seed(0)
    if kind == "nano":
        model = Nano(layers, width, heads).to(device)
        optimizer = adamw(model)
    elif kind == "plain":
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder / size)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = AutoModelForCausalLM.from_config(config).to(device)
        optimizer = adamw(model)
    else:
        import train_llm

        arguments = argparse.Namespace(
            seed=0,
            tokenizer_name=str(folder / size),
            model_name=str(folder / size),
            seq_length=LENGTH,
            dropout=None,
            init="fresh",
            dtype="bfloat16",
            lr=6e-4,
            weight_decay=0.1,
        )
        _, model, optimizer = train_llm.load_train_objs(arguments)
        model.to(device).compile()
        fused = torch.compile(train_llm.cross_entropy, options={"use_fast_math": True})
        scale = torch.full((), 1 / (ACCUMULATION * batch_size * LENGTH), device=device)

    @torch.compile
    def loss_of(source, targets):
        output = (
            model(source) if kind == "nano" else model(input_ids=source, use_cache=False).logits
        )
        return F.cross_entropy(output.flatten(0, 1), targets.flatten()) / ACCUMULATION

    def batch():
        rows = torch.randint(0, 50257, (batch_size, LENGTH + 1), device=device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    batches = [batch() for _ in range(2 * ACCUMULATION)]

    def step():
        for source, targets in batches[:ACCUMULATION]:
            with torch.autocast("cuda", torch.bfloat16):
                if kind == "bare":
                    logits = model(input_ids=source, use_cache=False).logits
                else:
                    loss = loss_of(source, targets)
            if kind == "bare":
                _, gradient = fused(logits.detach(), targets, 50257, scale)
                logits.backward(gradient)
            else:
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        batches.extend(batches[:ACCUMULATION])
        del batches[:ACCUMULATION]

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    tokens = STEPS * ACCUMULATION * batch_size * LENGTH
    print("tokens/s", tokens / (time.perf_counter() - begin))


def prepare(folder):
    """Write what the script is given: two configs, a tokenizer of 50257 words, a random text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(50257)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="50256")
    for size, (layers, width, heads, _) in SIZES.items():
        GPT2Config(n_layer=layers, n_embd=width, n_head=heads).save_pretrained(folder / size)
        tokenizer.save_pretrained(folder / size)
    numbers = torch.randint(0, 50256, (3_000_000,)).tolist()
    (folder / "text.txt").write_text(" ".join(map(str, numbers)))


def run_script(folder, size="gpt2", processes=1, accumulation=ACCUMULATION, log_freq=10, **env):
    """Run train_llm.py; return the rows of its log, and when it was started."""
    batch_size = SIZES[size][3]
    shutil.rmtree(folder / "outputs" / "default", ignore_errors=True)
    command = [sys.executable, ROOT / "train_llm.py"]
    if processes > 1:
        options = ("--standalone", f"--nproc-per-node={processes}")
        command[1:1] = ["-m", "torch.distributed.run", *options]
    command += ["--model-name", folder / size, "--dataset-name", folder / "text.txt"]
    command += ["--batch-size", batch_size]
    command += ["--global-batch-size", batch_size * processes * accumulation]
    command += ["--max-steps", STEPS + 10, "--log-freq", log_freq, "--eval-freq", 10**6]
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes))), **env}
    begin = time.time()
    run(command, folder, env)
    log = folder / "outputs" / "default" / "metrics.jsonl"
    rows = map(json.loads, log.read_text().splitlines())
    return [row for row in rows if "train/loss" in row], begin


def run(command, folder, env):
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    command = list(map(str, command))
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def script_speed(folder, size="gpt2", processes=1, accumulation=ACCUMULATION):
    """Tokens per second, without the first ten steps."""
    rows, _ = run_script(folder, size, processes, accumulation)
    parts = {key: value for key, value in rows[-2].items() if key.startswith("time/")}
    print("      ", " ".join(f"{key[5:]} {value:.2%}" for key, value in parts.items()), end=" ")
    print(f"memory {rows[-2]['train/memory_gib']:.1f} GiB", flush=True)
    return statistics.median(row["train/tokens_per_second"] for row in rows[1:])


def bare_speed(kind, folder, size="gpt2"):
    command = [sys.executable, __file__, "--bare", kind, "--size", size, "--folder", folder]
    return float(run(command, folder, {"CUDA_VISIBLE_DEVICES": "0"}).rpartition("tokens/s")[2])


def start_row(folder):
    """Seconds to the end of the first step, of which the report comes right after it."""
    for cache in "cold", "warm":
        cached = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        rows, begin = run_script(folder, log_freq=1, **cached)
        print(f"start    {cache} compile cache: {rows[0]['timestamp'] - begin:6.1f} s", flush=True)


def save_rows(folder):
    """Run in this process: stall of a snapshot, steps while it is written, time to read it."""
    import train_llm

    os.chdir(folder)
    shutil.rmtree("outputs/default", ignore_errors=True)
    on_gpu = torch.cuda.is_available()
    sys.argv[1:] = ["--model-name", "gpt2", "--dataset-name", "text.txt", "--max-steps", "1000"]
    sys.argv += ["--batch-size", "64"] if on_gpu else ["--batch-size", "1", "--seq-length", "32"]
    trainer = train_llm.build_trainer(train_llm.parse_args())
    trainer.bar = train_llm.tqdm(disable=True)
    trainer.batches = iter(trainer.train_data)

    def seconds(work, repeat=1):
        synchronize()
        begin = time.perf_counter()
        for _ in range(repeat):
            work()
        synchronize()
        return (time.perf_counter() - begin) / repeat

    def synchronize():
        if on_gpu:
            torch.cuda.synchronize()

    def step():
        trainer._run_step(trainer.steps_run)
        trainer.steps_run += 1
        trainer._agree()

    def plain_save():
        model, optimizer = trainer.model.module.state_dict(), trainer.optimizer.state_dict()
        with open("plain.pt", "wb") as file:
            torch.save({"model": model, "optimizer": optimizer}, file)
            file.flush()
            os.fsync(file.fileno())

    seconds(step, 3)
    alone = seconds(step, 10)
    first = seconds(lambda: trainer._save(True, []))
    plain, stall, busy = [], [], []
    for _ in range(3):
        trainer.writing.result()
        plain.append(seconds(plain_save))
        stall.append(seconds(lambda: trainer._save(True, [])))
        begin, steps = time.perf_counter(), 0
        while not trainer.writing.done():
            seconds(step)
            steps += 1
        busy.append((time.perf_counter() - begin) / max(steps, 1))
    plain, stall, busy = map(statistics.median, (plain, stall, busy))
    (path, *_) = trainer._snapshots()
    size = path.stat().st_size / 2**30

    def load(mmap):
        torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    load(False)
    read = statistics.median(seconds(lambda: load(False)) for _ in range(5))
    mapped = statistics.median(seconds(lambda: load(True)) for _ in range(5))
    print(f"save     {size:.2f} GiB: torch.save {plain:.3f} s, a step waits {stall:.3f} s", end=" ")
    print(f"({stall / plain:.3f} of it; the first time, which makes buffers, {first:.3f} s)")
    print(f"         a step takes {alone:.3f} s, while the file is written {busy:.3f} s", end=" ")
    print(f"(speed {alone / busy:.3f})")
    print(f"         read in {read:.3f} s, with mmap in {mapped:.4f} s ({read / mapped:.0f} times)")
    del trainer.batches


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = ("nano", "plain", "bare", "script", "medium", "gpus", "save", "start")
    parser.add_argument("--only", nargs="+", choices=rows, default=rows)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bare", help=argparse.SUPPRESS)  # a child of this program
    parser.add_argument("--size", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        return bare_loop(args.bare, args.size, args.folder)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        print(f"torch {torch.__version__}, {torch.cuda.device_count()} x", end=" ", flush=True)
        print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", flush=True)
        if "start" in args.only:
            start_row(folder)
        measure(args, folder)
        if "save" in args.only:
            save_rows(folder)


def measure(args, folder):
    gpus = torch.cuda.device_count()
    ways = {
        "nano": lambda: bare_speed("nano", folder),
        "plain": lambda: bare_speed("plain", folder),
        "bare": lambda: bare_speed("bare", folder),
        "script": lambda: script_speed(folder),
    }
    ways = {name: way for name, way in ways.items() if name in args.only}
    if "gpus" in args.only:
        for accumulation in ACCUMULATION, 1:
            for count in 1, gpus:
                name = f"{count} GPUs, accumulation {accumulation}"
                ways[name] = lambda n=count, a=accumulation: script_speed(folder, "gpt2", n, a) / n
    speeds = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            speeds[name].append(way())
            print(f"{name:24} {speeds[name][-1]:9,.0f} tokens/s a GPU", flush=True)
    if "medium" in args.only:
        speeds["medium"] = [script_speed(folder, "medium")]
    print("\nmedian of the rounds, tokens/s a GPU")
    for name, found in speeds.items():
        mfu = statistics.median(found) * operations(name) / peak()
        print(f"{name:24} {statistics.median(found):9,.0f}  MFU {mfu:.2%}  {[*map(round, found)]}")


def operations(name):
    layers, width, _, _ = SIZES["medium" if name == "medium" else "gpt2"]
    parameters = 50257 * width + layers * (12 * width + 13) * width + 2 * width
    return 6 * parameters + 12 * layers * width * LENGTH


def peak():
    import train_llm

    return train_llm.peak_flops(torch.device("cuda", 0)) or float("nan")


if __name__ == "__main__":
    main()
