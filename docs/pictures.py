"""Draw the pictures of how-ddp-works.md. The tests compare them with what this draws.

python docs/pictures.py
"""

from itertools import pairwise
from math import ceil, log2
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

FORWARD, BACKWARD, EDGE = "#1f4e9e", "#b3261e", "#444444"
BOX = {"boxstyle": "round,pad=0.4", "edgecolor": EDGE, "facecolor": "#f3f5f9"}


def canvas(width, height):
    """A white picture of so many inches, with ten units to the inch."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10 * width), ylim=(0, 10 * height))
    axes.set_axis_off()
    return figure, axes


def write(axes, x, y, text, **style):
    axes.text(x, y, text, **{"fontsize": 11.5, "ha": "center", "va": "center"} | style)


def arrow(axes, start, end, color=EDGE, **style):
    style |= {"arrowstyle": "-|>", "color": color, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)


def loss_graph(w, x, y):
    """The value and the gradient of each node of (w * x - y) ** 2, by its name."""
    product = w * x
    error = product - y
    slope = 2 * error
    return {
        "w": (w, slope * x),
        "product": (product, slope),
        "error": (error, slope),
        "loss": (error**2, 1),
    }


def draw_graph(w=2, x=3, y=4, rate=0.05):
    nodes = loss_graph(w, x, y)
    figure, axes = canvas(8.6, 3.4)
    formulas = "w", "product = w · x", "error = product − y", "loss = error²"
    slopes = f"times x = {x}", "times 1", f"times 2 · error = {2 * nodes['error'][0]}"
    places = 8, 29, 54, 77
    for place, formula, (value, gradient) in zip(places, formulas, nodes.values(), strict=True):
        write(axes, place, 25, formula, weight="bold")
        write(axes, place, 20.5, value, color=FORWARD, bbox=BOX, fontsize=14)
        write(axes, place, 14.5, gradient, color=BACKWARD, bbox=BOX, fontsize=14)
    for (left, right), slope in zip(pairwise(places), slopes, strict=True):
        arrow(axes, (left + 3, 20.5), (right - 3, 20.5), FORWARD)
        arrow(axes, (right - 3, 14.5), (left + 3, 14.5), BACKWARD)
        write(axes, (left + right) / 2, 12.3, slope, color=BACKWARD)
    for text, place in (f"x = {x}", places[1]), (f"y = {y}", places[2]):
        write(axes, place, 31, text, color=FORWARD, bbox=BOX)
        arrow(axes, (place, 29.2), (place, 26.5), FORWARD)
    write(axes, 3, 31, "forward: values →", color=FORWARD, ha="left")
    write(axes, 83, 9, "← backward: gradients", color=BACKWARD, ha="right")
    arrow(axes, (8, 12.5), (8, 6.5))
    gradient = nodes["w"][1]
    step = f"optimizer step: w = {w} − {rate} · {gradient} = {w - rate * gradient:g}"
    write(axes, 4, 4.5, step, ha="left", bbox=BOX)
    return figure


def tree(ranks):
    """The rounds of a broadcast from rank 0: in each, who sends to whom."""
    doubling = [2**number for number in range(ceil(log2(ranks)))]
    return [[(rank, rank + have) for rank in range(min(have, ranks - have))] for have in doubling]


def draw_tree(ranks=8):
    figure, axes = canvas(8, 4)
    places = [21 + 7.8 * rank for rank in range(ranks)]
    rounds = [[], *tree(ranks)]
    lines = [31 - 9 * number for number in range(len(rounds))]
    for rank, place in enumerate(places):
        write(axes, place, 36.5, f"rank {rank}")
    have = 1
    for number, (line, messages) in enumerate(zip(lines, rounds, strict=True)):
        write(axes, 2, line, f"after round {number}" if number else "at first", ha="left")
        have += len(messages)
        for rank, place in enumerate(places):
            fill = FORWARD if rank < have else "white"
            axes.plot(place, line, "o", markersize=13, color=fill, markeredgecolor=EDGE)
        for sender, receiver in messages:
            start = places[sender] + 0.6, lines[number - 1] - 0.9
            arrow(axes, start, (places[receiver] - 0.9, line + 0.7))
    return figure


def resumed(save_every, died_in):
    """The epoch at which a job goes on that died in this one."""
    return died_in - died_in % save_every


def draw_crash(save_every=2, died_in=5):
    figure, axes = canvas(9.6, 4.4)
    above, below, wide, start, again = 30, 15, 5.4, 11, 76
    first = resumed(save_every, died_in)
    death = start + wide * died_in + 4
    noticed, joined = death + 11, death + 20

    def bar(row, left, right, text, color):
        axes.barh(row, right - left, 4.4, left, color=color, edgecolor=EDGE)
        write(axes, (left + right) / 2, row, text)

    for name, row in ("node A", above), ("node B", below):
        write(axes, 2, row, name, ha="left", weight="bold")
        for epoch in range(died_in + 1):
            left = start + wide * epoch
            color = "#f6c7c3" if epoch >= first else "#dbe6f7"
            bar(row, left, min(left + wide, death), epoch, color)
        for number in range(3):
            left = again + wide * number
            bar(row, left, left + wide, first + number, "#dbe6f7")
    bar(above, death, noticed, "waits", "#fbe3b5")
    bar(above, noticed, again, "rendezvous", "#e6e6e6")
    write(axes, death + 2, below, "✕", color=BACKWARD, fontsize=22)
    write(axes, death + 10, below, "is dead", color=BACKWARD)
    bar(below, joined, again, "rendezvous", "#e6e6e6")

    for epochs in range(save_every, died_in + 1, save_every):
        place = start + wide * epochs
        arrow(axes, (place, above - 2.3), (place, above - 6))
        write(axes, place, above - 7.4, "snapshot")
    place += 5.5
    arrow(axes, (place, above - 7.4), (again, above - 7.4))
    write(
        axes, (place + again) / 2, above - 5.8, f"read: {first} epochs done, go on at epoch {first}"
    )
    middle = (start + wide * first + death) / 2
    write(axes, middle, below - 4, "lost: trained again", color=BACKWARD)
    write(axes, (joined + again) / 2, below - 4, "torchrun, typed again")
    events = {
        noticed: "1, 2  the collective fails or times out,\nthe agent stops its workers",
        again: "3, 4  two agents again:\nnew ranks, new workers",
    }
    for place, text in events.items():
        arrow(axes, (place, above + 5), (place, above + 2.4))
        write(axes, place - 6 if place == noticed else place + 4, above + 8, text)
    arrow(axes, (start, 5), (92.5, 5))
    write(axes, start, 2.8, f"time, not to scale, in epochs (--save_every {save_every})", ha="left")
    return figure


PICTURES = {"graph.svg": draw_graph, "tree.svg": draw_tree, "crash.svg": draw_crash}


def main(folder: Path):
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "how DDP works"}):
        for name, draw in PICTURES.items():
            draw().savefig(folder / name, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(__file__).parent / "pictures")
