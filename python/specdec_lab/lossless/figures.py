"""The laboratory's figures. matplotlib is imported where one is drawn: nothing else needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .experiments import Finding
from .rejections import Simulation
from .tradeoff import Point

TARGET, DRAFT, SEEN, REJECTED = "#3266ad", "#3a9a5c", "#e8862e", "#c8403c"


def canvas(rows: int, columns: int, height: float = 3.0) -> tuple[Any, Any]:
    """(figure, axes ``[rows, columns]``) without a window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns, height * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def save(figure: Any, to: Path) -> None:
    """As a PNG that does not change with the date."""
    import matplotlib.pyplot as plt

    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=130, metadata={"Software": None})
    plt.close(figure)


def first_tokens(findings: list[Finding], to: Path) -> None:
    """Target, draft and observed frequency of the likeliest ids, a panel a prompt (seed 000)."""
    figure, axes = canvas(2, 2)
    for axis, finding in zip(axes.flat, findings, strict=False):
        place = torch.arange(len(finding.shown))
        for column, (label, colour) in enumerate(
            (("target", TARGET), ("draft", DRAFT), (f"speculative, {finding.fit.draws:,} draws", SEEN))
        ):
            axis.bar(
                place + 0.27 * (column - 1), [row[1 + column] for row in finding.shown], 0.27, label=label, color=colour
            )
        axis.set_xticks(place, [str(row[0]) for row in finding.shown], rotation=90, fontsize=6)
        axis.set_title(
            f"{finding.case}, {finding.method}: std of the deviation {finding.fit.deviation:.3g}, "
            f"predicted {finding.fit.expected_deviation:.3g}",
            fontsize=8, loc="left",
        )  # fmt: skip
        axis.set_xlabel("token id", fontsize=8)
        axis.set_ylabel("probability", fontsize=8)
    axes[0, 0].legend(fontsize=8, frameon=False)
    save(figure, to)


def _smooth(values: Tensor, width: float) -> Tensor:
    """A density: each id's mass spread over its neighbours by a Gaussian."""
    place = torch.arange(len(values), dtype=torch.float64)
    kernel = torch.exp(-((place[:, None] - place) ** 2) / (2 * width**2))
    return (kernel / kernel.sum(0)) @ values


def proof(p: Tensor, q: Tensor, to: Path, ids: int = 60) -> None:
    """The pictures of the proof (seed 002) from real rows p and q ``[vocab]``: the likeliest ids, in order of p / q."""
    chosen = (p + q).topk(min(ids, len(p))).indices
    chosen = chosen[(p[chosen] / q[chosen].clamp(min=1e-300)).log().argsort()]
    bars = (p[chosen], q[chosen])
    p, q = (_smooth(row, 2.5) for row in bars)
    x = torch.arange(len(p))
    both, over, under = torch.minimum(p, q), (q - p).clamp(min=0), (p - q).clamp(min=0)
    figure, axes = canvas(2, 3)
    panels = axes.flat
    for axis in (panels[0], panels[2]):
        axis.plot(x, p, color=TARGET, label="target p")
        axis.plot(x, q, color=DRAFT, label="draft q")
    panels[0].set_title("1  two distributions, as densities over the ids in order of p / q", fontsize=9, loc="left")
    for shift, row, colour in ((-0.2, bars[0], TARGET), (0.2, bars[1], DRAFT)):
        panels[1].bar(x + shift, row, 0.4, color=colour)
    panels[1].set_title("2  the rows themselves", fontsize=9, loc="left")
    panels[2].fill_between(x, p.minimum(q), q, color=REJECTED, alpha=0.4, label="drafted too often")
    panels[2].fill_between(x, p.minimum(q), p, color="#e6c34a", alpha=0.6, label="drafted too rarely")
    panels[2].set_title(f"3  equal areas: {float(over.sum()):.3f} and {float(under.sum()):.3f}", fontsize=9, loc="left")
    accept = (p / q.clamp(min=1e-300)).clamp(max=1)
    twin = panels[3].twinx()
    twin.plot(x, accept, color="black", linewidth=0.8, linestyle="--")
    twin.set_ylim(0, 1.4)
    twin.tick_params(labelsize=8)
    panels[3].plot(x, q, color=DRAFT, label="q")
    panels[3].fill_between(x, both, color=SEEN, alpha=0.5, label="q times min(1, p / q)")
    panels[3].set_title("4  accepted: q times min(1, p / q), dashed", fontsize=9, loc="left")
    panels[4].plot(x, under / under.sum().clamp(min=1e-300), color=REJECTED, label="residual norm((p - q)+)")
    panels[4].fill_between(x, under, color=REJECTED, alpha=0.5, label="times P(reject): (p - q)+")
    panels[4].set_title("5  rejected: P(reject) times the residual", fontsize=9, loc="left")
    panels[5].fill_between(x, both, color=SEEN, alpha=0.5, label="accepted")
    panels[5].fill_between(x, both, both + under, color=REJECTED, alpha=0.5, label="from the residual")
    panels[5].plot(x, p, color=TARGET, linewidth=2, label="target p")
    panels[5].set_title("6  their sum is the target", fontsize=9, loc="left")
    for axis in panels:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, frameon=False)
    save(figure, to)


def front(points: list[Point], to: Path) -> None:
    """Bias over rejections with Theorem 5's line and the kernels' points on it, a panel a pair of rows (seed 003)."""
    names = list(dict.fromkeys(point.rows for point in points))
    figure, axes = canvas(1, len(names), 3.6)
    for axis, name in zip(axes.flat, names, strict=True):
        of_name = [point for point in points if point.rows == name]
        edge = of_name[0].variation
        axis.plot([0, edge], [edge, 0], color="black", linewidth=1, label="P(reject) + bias = TV(p, q)")
        axis.fill_between([0, edge], [edge, 0], color="0.92", label="no algorithm is here")
        for residual, colour, marker in (("OPT", TARGET, "o"), ("UNO", REJECTED, "s")):
            mine = [point for point in of_name if point.residual == residual]
            axis.plot([p.rejected_theory for p in mine], [p.bias_theory for p in mine], color=colour, linewidth=0.8)
            axis.plot([p.rejected for p in mine], [p.bias for p in mine], marker, color=colour, markersize=5,
                      label=f"Decoding-{residual}, measured")  # fmt: skip
            for point in mine if residual == "OPT" else ():
                if point.rejected > 1e-3:
                    axis.annotate(f"ε {point.epsilon:g}", (point.rejected, point.bias), (6, 4),
                                  textcoords="offset points", fontsize=7)  # fmt: skip
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_xlabel("P(reject)", fontsize=8)
        axis.set_ylabel("total variation to the target", fontsize=8)
    axes[0, 0].legend(fontsize=7, frameon=False)
    save(figure, to)


def simulations(found: list[Simulation], scaling: dict[str, list[float]], to: Path) -> None:
    """Rejections of simulated texts beside Theorem 1 and Theorem 3, and over M with the limit (seed 003)."""
    figure, axes = canvas(1, 3, 3.4)
    groups = ([s for s in found if s.drafts == 1], [s for s in found if s.drafts > 1])
    for axis, group, title in zip(axes.flat, groups, ("Theorem 1: one draft", "Theorem 3: M drafts"), strict=False):
        for simulation, colour in zip(group, (TARGET, DRAFT, SEEN), strict=False):
            label = f"M = {simulation.drafts}: {simulation.mean:.2f} ± {simulation.spread:.2f}"
            axis.plot(*zip(*simulation.running, strict=True), color=colour, marker=".", linewidth=0.8, label=label)
            axis.axhline(simulation.theory, color=colour, linestyle="--", label=f"theory {simulation.theory:.2f}")
        axis.set_xscale("log")
        axis.set_xlabel("texts", fontsize=8)
        axis.set_ylabel("mean rejections", fontsize=8)
        axis.set_title(title, fontsize=9, loc="left")
    axis = axes.flat[2]
    axis.plot(scaling["drafts"], scaling["rejections"], color=TARGET, label="E[rejections]")
    axis.plot([s.drafts for s in found], [s.mean for s in found], "o", color=SEEN, label="observed")
    axis.axhline(scaling["limit"][0], color="black", linestyle="--", label=f"M → ∞: {scaling['limit'][0]:.2f}")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("M", fontsize=8)
    axis.set_title("more drafts, to a limit above 0", fontsize=9, loc="left")
    for axis in axes.flat:
        axis.legend(fontsize=7, frameon=False)
    save(figure, to)


def improvements(panels: dict[str, list[tuple[int, float, float]]], to: Path) -> None:
    """Batch improvement over M for Bernoulli and uniform distributions (seed 003)."""
    figure, axes = canvas(1, len(panels), 3.0)
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=True):
        axis.plot([r[0] for r in rows], [r[1] for r in rows], color=TARGET, label="theory")
        axis.plot([r[0] for r in rows], [r[2] for r in rows], "o", color=SEEN, label="measured")
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("M", fontsize=8)
        axis.set_ylabel("improvement TV - Π_M", fontsize=8)
        axis.legend(fontsize=7, frameon=False)
    save(figure, to)
