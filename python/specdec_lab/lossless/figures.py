"""The laboratory's figures. matplotlib is imported where one is drawn: nothing else needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .experiments import Finding
from .rejections import Simulation
from .tradeoff import Point

TARGET, OUTPUT, DRAFT, INK = "#0072B2", "#D55E00", "#A0A0A0", "#333333"
PERCENT = "{:.1%}".format


def canvas(rows: int, columns: int, height: float = 3.0, message: str = "") -> tuple[Any, Any]:
    """(figure, axes ``[rows, columns]``) nine inches wide, without a window, the message in bold above them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (9, height * rows + 0.4 * bool(message))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    if message:
        figure.suptitle(message, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9, labelcolor=INK, color=DRAFT)
    return figure, axes


def save(figure: Any, to: Path) -> None:
    """As a PNG that does not change with the date."""
    import matplotlib.pyplot as plt

    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=120, metadata={"Software": None})
    plt.close(figure)


def first_tokens(findings: list[Finding], to: Path, ids: int = 16) -> None:
    """Target, draft and observed frequency of the likeliest ids, for the two prompts on which p and q differ most."""
    findings = sorted(findings, key=lambda f: -sum(abs(row[1] - row[2]) for row in f.shown))[:2]
    figure, axes = canvas(len(findings), 1, 2.7, "The output follows the target, wherever the draft is wrong")
    for axis, finding in zip(axes.flat, findings, strict=True):
        shown = finding.shown[:ids]
        place = range(len(shown))
        axis.bar(place, [row[1] for row in shown], 0.75, color=TARGET, alpha=0.35, label="target")
        axis.plot(place, [row[3] for row in shown], "o", color=OUTPUT, label="speculative decoding, observed")
        axis.plot(place, [row[2] for row in shown], "_", color=INK, markersize=16, markeredgewidth=2, label="draft")
        axis.set_xticks(place, [str(row[0]) for row in shown])
        axis.set_title(f"{finding.case}: {finding.fit.draws:,} first tokens", fontsize=9.5, loc="left")
        axis.set_ylabel("probability", fontsize=9.5)
    axes[-1, 0].set_xlabel("token id, likeliest under the target first", fontsize=9.5)
    axes[0, 0].legend(fontsize=9.5, frameon=False, ncols=3, loc="upper right")
    save(figure, to)


def proof(p: Tensor, q: Tensor, to: Path, ids: int = 14) -> None:
    """Accepted and redrawn probability add up to the target: three steps on the likeliest ids of p and q ``[vocab]``.

    Both are renormalised to these ids.
    """
    chosen = (p + q).topk(min(ids, len(p))).indices
    chosen = chosen[(p[chosen] / q[chosen].clamp(min=1e-300)).argsort()]
    p, q = p[chosen] / p[chosen].sum(), q[chosen] / q[chosen].sum()
    kept, over, under = torch.minimum(p, q), (q - p).clamp(min=0), (p - q).clamp(min=0)
    figure, axes = canvas(3, 1, 2.2, "Accepted and redrawn tokens add up to the target's distribution")
    rejected = PERCENT(float(over.sum()))
    panels = (
        (f"1  The draft proposes. Where q exceeds p, the excess is rejected: {rejected} of all drafts.", kept, over,
         OUTPUT, "rejected: q - p"),
        (f"2  A rejected token is redrawn where p exceeds q. The excess is {rejected} too.", 0 * kept, under,
         INK, "redrawn: p - q"),
        ("3  Accepted plus redrawn is the target p.", kept, under, INK, "redrawn"),
    )  # fmt: skip
    for axis, (title, below, above, colour, name) in zip(axes.flat, panels, strict=True):
        place = range(len(chosen))
        if float(below.sum()):
            axis.bar(place, below, 0.75, color=TARGET, alpha=0.55, label="accepted: min(p, q)")
        axis.bar(place, above, 0.75, bottom=below, color=colour, label=name)
        axis.set_title(title, fontsize=10, loc="left", color=INK)
        axis.set_ylabel("probability", fontsize=9.5)
        axis.set_ylim(0, 1.05 * float(torch.maximum(p, q).max()))
        axis.set_xticks(place, [str(i) for i in chosen.tolist()])
        axis.legend(fontsize=9.5, frameon=False, loc="upper center")
    axes[2, 0].set_xlabel(f"the {len(chosen)} likeliest token ids of a prompt, in order of p / q", fontsize=9.5)
    save(figure, to)


def front(points: list[Point], to: Path) -> None:
    """Bias over rejections with Theorem 5's line and the kernels' points on it, a panel a pair of rows."""
    names = list(dict.fromkeys(point.rows for point in points))
    figure, axes = canvas(1, len(names), 3.8, "Fewer rejections cost bias; OPT (blue) pays the least that is possible")
    for axis, name in zip(axes.flat, names, strict=True):
        of_name = [point for point in points if point.rows == name]
        edge = of_name[0].variation
        axis.fill_between([0, edge], [edge, 0], color="0.93")
        axis.text(edge * 0.3, edge * 0.25, "impossible", ha="center", fontsize=9.5, color="#777777")
        for residual, colour, marker in (("OPT", TARGET, "o"), ("UNO", OUTPUT, "s")):
            mine = [point for point in of_name if point.residual == residual]
            axis.plot([p.rejected_theory for p in mine], [p.bias_theory for p in mine], color=colour, linewidth=1.5)
            marks = {"color": colour, "markersize": 6, "clip_on": False, "zorder": 3}
            axis.plot([p.rejected for p in mine], [p.bias for p in mine], marker, **marks)
            end = max(mine, key=lambda point: point.rejected)
            place = (0.42 * end.rejected, edge + 0.42 * (end.bias - edge))
            shift, side = ((-8, -10), "right") if residual == "OPT" else ((8, 6), "left")
            axis.annotate(residual, place, shift, textcoords="offset points", ha=side, fontsize=11, color=colour)
            for point in mine if residual == "OPT" else ():
                if point.rejected > 0.1 * edge:  # the others lie on top of each other
                    axis.annotate(f"ε = {point.epsilon:g}", (point.rejected, point.bias), (7, 5),
                                  textcoords="offset points", fontsize=9)  # fmt: skip
        axis.set_title(f"{name} (lines: theory, marks: kernels)", fontsize=9, loc="left")
        axis.set_xlabel("probability that the draft is rejected", fontsize=9.5)
        axis.set_ylabel("bias: total variation to the target", fontsize=9.5)
        axis.set_xlim(0, 1.15 * edge)
        axis.set_ylim(0, 1.1 * edge)
    save(figure, to)


def simulations(found: list[Simulation], scaling: dict[str, list[float]], to: Path) -> None:
    """Mean rejections of simulated texts beside Theorems 1 and 3, over the number of drafts M, with the limit."""
    figure, axes = canvas(1, 1, 3.8, "More drafts per step: fewer rejections, down to a limit above 0")
    axis, limit = axes[0, 0], scaling["limit"][0]
    axis.plot(scaling["drafts"], scaling["rejections"], color=TARGET, linewidth=2)
    place = -3
    axis.annotate("Theorems 1 and 3", (scaling["drafts"][place], scaling["rejections"][place]), (8, 8),
                  textcoords="offset points", fontsize=10, color=TARGET)  # fmt: skip
    for s in found:
        axis.plot(s.drafts, s.mean, "o", color=OUTPUT, markersize=8, zorder=3)
        axis.annotate(f"observed {s.mean:.2f} ± {s.spread:.2f}, theory {s.theory:.2f}", (s.drafts, s.mean), (10, 3),
                      textcoords="offset points", fontsize=9, color=OUTPUT)  # fmt: skip
    axis.axhline(limit, color=INK, linewidth=1)
    axis.text(1, limit, f"limit for many drafts: {limit:.2f}", fontsize=9.5, va="bottom", color=INK)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 2, 4, 8, 16, 32, 64, 128], [str(m) for m in (1, 2, 4, 8, 16, 32, 64, 128)])
    axis.set_xlabel("drafts per step (M, log scale)", fontsize=9.5)
    axis.set_ylabel("rejections per text of 50 tokens", fontsize=9.5)
    save(figure, to)
