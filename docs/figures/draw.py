"""python docs/figures/draw.py: the drawings of the documentation, into docs/pictures. One message a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from specdec_kernels import RngKey, race_noise

FOLDER = Path(__file__).resolve().parent.parent / "pictures"
TARGET, DRAFT, KEPT, DROPPED, LINE = "#2f6db3", "#e08a2c", "#3d9a5f", "#c9ccd1", "#333333"


def sheet(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """An empty drawing in units of a tenth of an inch, y downwards."""
    figure, axis = plt.subplots(figsize=(9, 9 * height / width), layout="constrained")
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    axis.set_title(title, loc="left", fontsize=13)
    return figure, axis


def box(axis: Axes, x: float, y: float, width: float, text: str, colour: str, height: float = 1.0) -> None:
    """A box with its corner at (x, y)."""
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=colour, ec="white", lw=1.5
    )
    axis.add_patch(shape)
    white = colour in (TARGET, KEPT, LINE)
    axis.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", color="white" if white else LINE, fontsize=11
    )


def arrow(
    axis: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = LINE, bend: float = 0.0
) -> None:
    """An arrow between two points."""
    way = f"arc3,rad={bend}"
    axis.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=colour, lw=1.3, connectionstyle=way)
    )


def step() -> Figure:
    """Plain decoding beside one speculative step, over time."""
    figure, axis = sheet(24, 7.6, "One forward of the target checks several drafted tokens")
    axis.text(0, 1.1, "plain decoding", fontsize=12, va="center")
    for i, word in enumerate(("the", "cat", "sat", "on")):
        box(axis, 4.6 + 4.6 * i, 0.6, 4.4, "target forward", TARGET)
        axis.text(6.8 + 4.6 * i, 2.05, word, ha="center", fontsize=12, color=KEPT, weight="bold")
    axis.text(0, 4.1, "speculative", fontsize=12, va="center")
    for i in range(4):
        box(axis, 4.6 + 1.3 * i, 3.6, 1.2, "draft", DRAFT)
    box(axis, 9.9, 3.6, 4.8, "target forward", TARGET)
    box(axis, 14.8, 3.6, 1.5, "verify", DROPPED)
    for i, (word, colour) in enumerate((("the", DRAFT), ("cat", DRAFT), ("sat", DRAFT), ("by", DRAFT))):
        axis.text(5.2 + 1.3 * i, 5.05, word, ha="center", fontsize=12, color=colour, weight="bold")
    axis.text(17.0, 3.85, "the  cat  sat", fontsize=12, color=KEPT, weight="bold", va="center")
    axis.text(17.0, 4.75, "on", fontsize=12, color=TARGET, weight="bold", va="center")
    axis.text(20.9, 3.85, "accepted", fontsize=11, va="center")
    axis.text(18.1, 4.75, "drawn in place of \u201cby\u201d", fontsize=11, va="center")
    arrow(axis, (4.6, 6.5), (23.4, 6.5))
    axis.text(4.6, 7.15, "time", fontsize=11, va="center")
    return figure


def ratio() -> Figure:
    """Overlap, residual and excess of two distributions."""
    ids = ["a", "b", "c", "d", "e"]
    p, q = [0.40, 0.25, 0.20, 0.10, 0.05], [0.20, 0.45, 0.15, 0.05, 0.15]
    figure, axis = plt.subplots(figsize=(9, 3.8), layout="constrained")
    for i, (of_target, of_draft) in enumerate(zip(p, q, strict=True)):
        low = min(of_target, of_draft)
        axis.bar(i, low, color=KEPT, width=0.7)
        if of_target > of_draft:
            axis.bar(i, of_target - of_draft, bottom=low, color=TARGET, width=0.7)
        else:
            axis.bar(i, of_draft - of_target, bottom=low, fc="white", ec=DRAFT, hatch="//", width=0.7)
    axis.set_xticks(range(len(ids)), [f"id {x}" for x in ids])
    axis.set_ylabel("probability")
    axis.spines[["top", "right"]].set_visible(False)
    axis.text(1.42, 0.40, "(q - p)+: rejected drafts, 0.30 in all", color="#a35f12", fontsize=11)
    axis.text(1.42, 0.34, "(p - q)+: the residual, drawn after a rejection, 0.30 in all", color=TARGET, fontsize=11)
    axis.text(1.42, 0.28, "min(p, q): accepted drafts, 0.70 in all", color=KEPT, fontsize=11)
    axis.set_title("Accepted drafts and residual draws add up to the target p; q is the draft", loc="left", fontsize=13)
    return figure


def keys() -> Figure:
    """A request in two batches."""
    figure, axis = sheet(24, 8.2, "A token depends on its key, not on the batch: seed 7 gets the same text twice")
    batches = [("batch of two", [(7, "the cat sat on"), (3, "once upon a time")])]
    batches += [("batch of three", [(9, "import os and sys"), (5, "we show that it"), (7, "the cat sat on")])]
    x = 0.0
    for name, rows in batches:
        axis.text(x, 0.9, name, fontsize=12)
        for i, (seed, words) in enumerate(rows):
            same = seed == 7
            axis.text(x, 2.1 + 1.25 * i, f"seed {seed}", va="center", fontsize=11, weight="bold" if same else "normal")
            for j, word in enumerate(words.split()):
                box(axis, x + 2.3 + 2.2 * j, 1.6 + 1.25 * i, 2.1, word, KEPT if same else DROPPED)
        x += 12.4
    axis.text(0, 6.35, "position", fontsize=11, va="center")
    for start in (0.0, 12.4):
        for j in range(4):
            axis.text(start + 3.35 + 2.2 * j, 6.35, str(j + 10), ha="center", va="center", fontsize=11)
    axis.text(
        0, 7.6, "random numbers of a token = Philox(seed, position, step, purpose, token id)", fontsize=12, va="center"
    )
    return figure


def race() -> Figure:
    """Two distributions, drawn from with the same random numbers."""
    p = torch.tensor([0.34, 0.27, 0.17, 0.12, 0.10])
    q = torch.tensor([0.22, 0.36, 0.20, 0.12, 0.10])
    noise = -race_noise(RngKey(torch.tensor([3]), torch.tensor([0])), torch.arange(5))[0].double().log()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, weights, name, colour in ((panels[0], q, "draft", DRAFT), (panels[1], p, "target", TARGET)):
        score = weights.log() + noise
        best = int(score.argmax())
        base = float(min((p.log() + noise).min(), (q.log() + noise).min())) - 0.6
        bars = axis.bar(
            range(5),
            (score - base).tolist(),
            bottom=base,
            color=[colour if i == best else DROPPED for i in range(5)],
            width=0.7,
        )
        axis.bar_label(bars, [f"{w:.2f}" for w in weights], fontsize=10, padding=2)
        axis.set_xticks(range(5), [f"id {x}" for x in "abcde"])
        axis.set_title(f"{name}: id {'abcde'[best]} wins", loc="left", fontsize=12)
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("log probability + noise of the id")
    figure.suptitle(
        "With the same noise, similar distributions mostly draw the same token", x=0.01, ha="left", fontsize=13
    )
    return figure


def digest() -> Figure:
    """What a draw looks into: bounds of blocks, best score, and the few blocks above it."""
    generator = torch.Generator().manual_seed(5)
    count, size = 32, 64
    logits = 2.2 * torch.randn(count, size, generator=generator)
    key = RngKey(torch.tensor([11]), torch.tensor([0]))
    noise = race_noise(key, torch.arange(count * size))[0].view(count, size)
    score = logits - noise.log()
    bound = logits.amax(1) - noise.amin(1).log()
    best = float(score.max())
    figure, (top, low) = plt.subplots(2, 1, figsize=(9, 5.2), layout="constrained", sharex=True)
    ids = torch.arange(count * size) / size
    top.plot(ids, logits.flatten(), ".", color=DROPPED, markersize=2)
    top.bar(torch.arange(count) + 0.5, logits.amax(1), width=0.9, color="none", edgecolor=TARGET, lw=1.2)
    top.set_ylabel("logit")
    top.set_title("The digest keeps the largest logit of each block of 64 ids", loc="left", fontsize=12)
    looked = [float(b) >= best for b in bound]
    low.bar(torch.arange(count) + 0.5, bound, width=0.9, color=[DRAFT if one else DROPPED for one in looked])
    low.axhline(best, color=LINE, lw=1.2)
    low.annotate("best score", (0.1, best), xytext=(0, 4), textcoords="offset points", fontsize=10)
    low.set_ylabel("bound of the score")
    low.set_xlabel("block of 64 ids")
    name = f"A draw looks into the {sum(looked)} blocks whose bound reaches the best score"
    low.set_title(name, loc="left", fontsize=12)
    for axis in (top, low):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def tree() -> Figure:
    """A tree of candidates and its mask."""
    figure, axis = sheet(24, 8.4, "A tree of candidates, and which positions each node attends")
    places = {
        0: (1.0, 3.6, "root"),
        1: (5.0, 1.9, "the"),
        2: (5.0, 5.3, "a"),
        3: (9.0, 1.9, "cat"),
        4: (9.0, 5.3, "dog"),
    }
    parents = [-1, 0, 0, 1, 2]
    for node, parent in enumerate(parents):
        if parent >= 0:
            x, y, _ = places[parent]
            arrow(axis, (x + 2.2, y + 0.5), (places[node][0], places[node][1] + 0.5))
    for node, (x, y, word) in places.items():
        box(axis, x, y, 2.2, f"{node}: {word}", TARGET if node == 0 else DRAFT)
    axis.text(1.0, 7.4, "parents = [-1, 0, 0, 1, 2]", fontsize=12, va="center")
    columns = ["cache", "0", "1", "2", "3", "4"]
    for j, name in enumerate(columns):
        axis.text(15.7 + 1.35 * j, 0.95, name, ha="center", va="center", fontsize=11)
    for node in range(5):
        attended, up = {node}, node
        while parents[up] >= 0:
            up = parents[up]
            attended.add(up)
        axis.text(14.6, 1.95 + 1.15 * node, f"node {node}", ha="right", va="center", fontsize=11)
        for j in range(6):
            seen = j == 0 or j - 1 in attended
            box(axis, 15.05 + 1.35 * j, 1.45 + 1.15 * node, 1.25, "", KEPT if seen else DROPPED)
    axis.text(15.05, 7.75, "green: attended", fontsize=12, va="center", color=KEPT)
    return figure


def compact() -> Figure:
    """Rows of a cache before and after a step is committed."""
    figure, axis = sheet(24, 6.6, "Rows of the accepted path move together; the rest is dropped")
    axis.text(0, 1.6, "after the forward", fontsize=12, va="center")
    names = ["c0", "c1", "c2", "root", "node 1", "node 2", "node 3", "node 4"]
    colours = [DROPPED, DROPPED, DROPPED, TARGET, "white", KEPT, KEPT, "white"]
    for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
        box(axis, 5.4 + 2.2 * i, 1.1, 2.1, name, colour)
    axis.text(0, 4.6, "after the commit", fontsize=12, va="center")
    for i, (name, colour) in enumerate(
        zip(["c0", "c1", "c2", "root", "node 2", "node 3"], [*colours[:4], KEPT, KEPT], strict=True)
    ):
        box(axis, 5.4 + 2.2 * i, 4.1, 2.1, name, colour)
    for node, place in ((5, 4), (6, 5)):
        arrow(axis, (6.45 + 2.2 * node, 2.2), (6.45 + 2.2 * place, 4.0), KEPT)
    axis.text(19.0, 4.6, "2 slots free", fontsize=11, va="center")
    axis.text(5.4, 6.0, "committed", fontsize=11, va="center")
    axis.text(14.2, 6.0, "accepted: path = [2, 3]", fontsize=11, color=KEPT, va="center")
    return figure


def tokens() -> Figure:
    """Expected tokens a step, over the draft length."""
    lengths = range(0, 13)
    figure, axis = plt.subplots(figsize=(9, 3.8), layout="constrained")
    for chance, colour in ((0.9, TARGET), (0.8, KEPT), (0.7, DRAFT), (0.5, LINE)):
        expected = [(1 - chance ** (n + 1)) / (1 - chance) for n in lengths]
        axis.plot(lengths, expected, color=colour, marker="o", markersize=4)
        axis.text(12.2, expected[-1], f"{chance:.0%} accepted", color=colour, va="center", fontsize=11)
    axis.set(xlim=(0, 14), ylim=(0, None), xlabel="drafted tokens a step", ylabel="tokens a step")
    axis.set_xticks(list(lengths))
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title("Longer drafts help only where most drafts are accepted", loc="left", fontsize=13)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "step": step, "ratio": ratio, "keys": keys, "race": race, "digest": digest, "tree": tree, "compact": compact,
    "tokens": tokens,
}  # fmt: skip


def main(folder: Path = FOLDER) -> None:
    """Draw all pictures."""
    matplotlib.rcParams.update({"font.family": "DejaVu Sans", "hatch.color": DRAFT})
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
