"""A training run with a budget of processor time: learning rate, progress bar, loss curve, checkpoint, resume.

The learning rate follows the time spent, summed over threads: on a busy machine a run takes longer and does the same.
"""

from __future__ import annotations

import ctypes
import json
import math
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

WARMUP = 0.02  # share of the budget
SAVE_EVERY = 120.0  # seconds


@dataclass
class Curve:
    """A run's course: its measure in the mean of the batches since the last point, and on held-out text."""

    measure: str = "loss"
    step: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


def learning_rate(progress: float) -> float:
    """Share of the peak at a share of the budget: a short warm-up, then half a cosine to a hundredth."""
    if progress < WARMUP:
        return (progress + 0.001) / (WARMUP + 0.001)
    done = min((progress - WARMUP) / (1 - WARMUP), 1.0)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2


def optimizers(parameters: Iterable[nn.Parameter], embeddings: set[int], *, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else.

    Args:
        parameters: to be trained.
        embeddings: ids of the matrices that are tables, not maps.
        peak: learning rate of both; Muon's step is scaled to the size of AdamW's.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for p in parameters:
        (matrices if p.dim() == 2 and id(p) not in embeddings else rest).append(p)
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    if rest:
        made.append(torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    return made


class Run:
    """Trains for so many minutes of processor time in all, and goes on where an interrupted run stopped."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        minutes: float,
        peak: float,
        seed: int,
        folder: Path,
        resume: bool,
        measure: str = "loss",
    ) -> None:
        """Prepare the run.

        Args:
            model: whose parameters a checkpoint holds.
            optimizers: of these parameters.
            minutes: of processor time in all, those before a resume included.
            peak: learning rate.
            seed: of the batches.
            folder: for checkpoint.pt, curve.json and curve.png.
            resume: go on from the checkpoint, which must exist.
            measure: name of what the curve shows.
        """
        self.model, self.optimizers, self.peak, self.budget = model, optimizers, peak, minutes * 60
        self.folder, self.curve = folder, Curve(measure)
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.spent = 0, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        _keep_memory()
        if resume:
            self._load()

    @property
    def progress(self) -> float:
        """Share of the budget that is spent."""
        return self.spent / self.budget

    def train(
        self,
        measures: Callable[[torch.Generator], tuple[Tensor, Tensor]],
        held_out: Callable[[], float],
        *,
        title: str,
        every: int = 200,
    ) -> float:
        """Train until the budget is spent.

        Args:
            measures: of one batch, drawn with the generator: its loss, and what the curve shows.
            held_out: what the curve shows, of text that is never trained on.
            title: of the progress bar.
            every: steps from one point of the curve to the next.

        Returns:
            The last held-out measure.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        recent, saved = [], time.monotonic()
        with Progress(*columns, refresh_per_second=1) as bar:
            task = bar.add_task(title, total=self.budget)
            while self.spent < self.budget:
                began = time.process_time()
                recent.append(self._step(measures))
                self.spent += time.process_time() - began
                if self.step % every == 0:
                    self._record(sum(recent) / len(recent), held_out())
                    recent.clear()
                if time.monotonic() - saved > SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()
                shown = f"{title} step {self.step} {self.curve.measure} {recent[-1]:.3f}" if recent else title
                bar.update(task, completed=self.spent, description=shown)
        self._record(sum(recent) / len(recent) if recent else self.curve.train[-1], held_out())
        self.save()
        return self.curve.held_out[-1]

    def save(self) -> None:
        """Write the checkpoint and the curve; a half-written file never replaces a whole one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "generator": self.generator.get_state(),
            "step": self.step,
            "spent": self.spent,
            "curve": asdict(self.curve),
        }
        torch.save(state, self.folder / "checkpoint.new")
        (self.folder / "checkpoint.new").replace(self.folder / "checkpoint.pt")
        (self.folder / "curve.json").write_text(json.dumps(asdict(self.curve)) + "\n")

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state["generator"])
        self.step, self.spent, self.curve = state["step"], state["spent"], Curve(**state["curve"])

    def _step(self, measures: Callable[[torch.Generator], tuple[Tensor, Tensor]]) -> float:
        rate = self.peak * learning_rate(self.progress)
        loss, shown = measures(self.generator)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return shown.item()

    def _record(self, train: float, held_out: float) -> None:
        curve = self.curve
        curve.step.append(self.step)
        curve.seconds.append(round(self.spent, 1))
        curve.train.append(round(train, 4))
        curve.held_out.append(round(held_out, 4))
        print(f"step {self.step} {self.spent:.0f} s train {train:.3f} held out {held_out:.3f}", flush=True)


def _keep_memory() -> None:
    """Let malloc keep what is freed: pages that come anew at every step cost a fifth of it."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(parameter, 2**30)
