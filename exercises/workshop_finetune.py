"""The check of `finetune`: two ranks train a tiny model, and are compared with one."""

import functools
import importlib.util
import json
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from exercises.checks import furthest
from exercises.workshop_looks import looked_at, run, what_went_wrong

REVIEWS = 16  # are one step of two ranks with 8 each, whoever gets which


def make_tiny_model(folder):
    """A GPT-Neo of two layers, a tokenizer that knows 20 words, and reviews made of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPTNeoConfig, GPTNeoForSequenceClassification, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()

    words = [f"word{number}" for number in range(20)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<end>", *words])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    tokenizer.save_pretrained(folder / "model")
    no_dropout = dict.fromkeys(("embed_dropout", "attention_dropout", "resid_dropout"), 0.0)
    sizes = {"vocab_size": 21, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    sizes |= {"max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]]}
    config = GPTNeoConfig(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same weights in each check
        GPTNeoForSequenceClassification(config).save_pretrained(folder / "model")
    with open(folder / "reviews.jsonl", "w") as file:
        for number in range(REVIEWS):
            text = " ".join(words[number:] + words[:number])
            file.write(json.dumps({"text": text, "label": number % 3 % 2}) + "\n")


def train(path, folder, nproc, batch_size):
    """Two epochs of the reader's program. What went wrong, what each rank saw, its losses."""
    place = folder / f"ranks{nproc}"
    args = ["--model", folder / "model", "--dataset", folder / "reviews.jsonl", "--epochs", 2]
    args += ["--output", "finetuned", "--batch_size", batch_size, "--lr", 0.01]
    done = looked_at(__file__, "training", path, place, *args, nproc=nproc)
    files = [place / f"rank{rank}" / "seen.pt" for rank in range(nproc)]
    seen = [torch.load(file, weights_only=True) for file in files if file.exists()]
    return what_went_wrong(*done), seen, re.findall(r"Loss: (\d+\.\d+)", done[1])


def shares_are_wrong(seen):
    """What is wrong with what two ranks did, without a look at anything else."""
    if not all(each["world_size"] == 2 for each in seen):
        return (
            "Nobody has joined a process group: two processes were started, and each trains "
            f"alone, on {len(sum(seen[0]['samples'], []))} reviews in 2 epochs of {REVIEWS}"
        )
    total = sum(len(batch) for each in seen for batch in each["samples"])
    both = len({*seen[0]["samples"][0]} & {*seen[1]["samples"][0]})
    if total != 2 * REVIEWS or both:
        return (
            f"The reviews are not divided: in 2 epochs of {REVIEWS} the ranks read {total}, and "
            f"{both} of {len(seen[0]['samples'][0])} in their first step are the same on both"
        )
    if seen[0]["samples"][0] in seen[0]["samples"][1:]:
        return "Epochs 0 and 1 have the reviews in the same order: nobody told the sampler"


def finetunes_on_all_gpus(path, folder):
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install -r requirements-llm.txt"
    folder = Path(folder)
    make_tiny_model(folder)
    problem, seen, losses = train(path, folder, 2, REVIEWS // 2)
    if problem or len(seen) != 2 or not all(each["weights"] for each in seen):
        return f"With two ranks it does not train: {problem or 'no step of an optimizer was seen'}"
    if problem := shares_are_wrong(seen):
        return problem
    if (away := furthest(*(each["weights"] for each in seen))) > 1e-6:
        return f"The ranks' models drift apart, by up to {away:.4f}: no gradient is exchanged"
    problem, alone, want = train(path, folder, 1, REVIEWS)
    if problem or not alone:
        return f"With two ranks it runs, with one it does not: {problem or 'it trains nothing'}"
    if (away := furthest(seen[0]["weights"], alone[0]["weights"])) > 1e-3:
        return f"The weights are up to {away:.4f} from those of one rank with the doubled batch"
    return not_the_loss_of_the_job(losses, want) or saved_wrongly(folder) or wrong_gpu(path, folder)


def not_the_loss_of_the_job(losses, want):
    if not losses or len(want) != 2:
        return f"2 epochs, and {len(losses)} lines with `Loss: ` and a number"
    near = [any(abs(float(loss) - float(right)) < 1e-4 for right in want) for loss in losses]
    if not all(near):
        return (
            "The printed loss is that of a rank's own reviews, not of the job's: "
            f"{', '.join(losses)} in two epochs; one rank with all reviews: {', '.join(want)}"
        )


def saved_wrongly(folder):
    from safetensors import safe_open

    places = sorted((folder / "ranks2").glob("rank*/finetuned"))
    writers = " and ".join(place.parent.name for place in places)
    if writers != "rank0":
        return f"One rank has to write, rank 0: finetuned/ was written by {writers or 'no rank'}"
    if not (places[0] / "model.safetensors").exists():
        return "finetuned/ has no model.safetensors: save the model by its save_pretrained"
    with safe_open(places[0] / "model.safetensors", "pt") as file:
        if wrong := [name for name in file.keys() if name.startswith("module.")]:
            return f"What is saved has DDP's names, that no other program knows: {wrong[0]}"


def wrong_gpu(path, folder):
    """The second rank of the second node, on a node of two GPUs that are not there."""
    args = ["--model", folder / "model", "--dataset", folder / "reviews.jsonl"]
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    where = {"RANK": "3", "LOCAL_RANK": "1"} | sizes
    _, output = looked_at(__file__, "device", path, folder / "device", *args, **where)
    if found := re.search(r"^model on (.*)$", output, re.MULTILINE):
        if found[1] != "cuda:1":
            return f"RANK 3, LOCAL_RANK 1, a node with 2 GPUs: the model goes to {found[1]}"
    if "backend gloo\n" in output:
        return "With GPUs the group talks by gloo, through main memory: NCCL is for GPUs"


def look_at_training(path):
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from transformers import GPTNeoForSequenceClassification as Model

    place = Path(f"rank{os.environ['RANK']}")
    place.mkdir()
    os.chdir(place)
    seen = {"samples": [], "weights": {}, "world_size": 0}
    forward = Model.forward

    @functools.wraps(forward)
    def look(self, input_ids=None, **rest):
        seen["samples"].append([tuple(row[row != 0].tolist()) for row in input_ids])
        seen["world_size"] = dist.get_world_size() if dist.is_initialized() else 0
        return forward(self, input_ids, **rest)

    def keep_weights(optimizer, *_):
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        seen["weights"] = {number: each.detach().clone() for number, each in enumerate(weights)}

    Model.forward = look
    dist.destroy_process_group = lambda group=None: None  # may hang while DDP lives: not asked here
    register_optimizer_step_post_hook(keep_weights)
    run(path)
    torch.save(seen, "seen.pt")


def look_at_device(path):
    """Pretend that there are two GPUs, and end when the model is sent to one."""
    from transformers import PreTrainedModel

    chosen = [0]

    def choose(device):
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        chosen[0] = device.index or 0

    def send(self, device=None, *_, **__):
        device = torch.device("cuda", device) if isinstance(device, int) else device
        device = torch.device(device or "cuda")
        gpu = chosen[0] if device.index is None else device.index
        print("model on", f"cuda:{gpu}" if device.type == "cuda" else device, flush=True)
        os._exit(0)

    def join(backend=None, *_, **__):
        print("backend", backend, flush=True)

    torch.cuda.is_available = torch.accelerator.is_available = lambda: True
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 2
    torch.cuda.set_device = torch.accelerator.set_device_index = choose
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: chosen[0]
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    dist.init_process_group, dist.is_initialized = join, lambda: True
    dist.get_rank, dist.get_world_size = lambda *_: 3, lambda *_: 4
    PreTrainedModel.to = PreTrainedModel.cuda = send
    run(path)
