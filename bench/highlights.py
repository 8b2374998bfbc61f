"""The few cases that README.md shows."""

from __future__ import annotations

from typing import NamedTuple

from .tables import Entry, Row, duration, entries, machine_name, markdown, multiple

# (op, case, task as a reader would name it); one where a rival is faster is among them.
CASES = (
    ("verify_chain", "llama-3 128256, batch 1, K 5, bf16", "5 drafts, batch 1"),
    ("verify_chain", "llama-3 128256, batch 64, K 5, bf16", "5 drafts, batch 64"),
    (
        "verify_chain",
        "llama-3 128256, batch 64, K 5, bf16, top-k 50 + top-p .95",
        "5 drafts, top-k and top-p, batch 64",
    ),
    ("verify_tree", "llama-3 128256, 64 nodes, batch 8, bf16, greedy", "greedy, tree of 64, batch 8"),
    ("verify_chain", "llama-3 128256, batch 1, K 5, fp32", "5 drafts, batch 1"),
    ("sample", "llama-3 128256, batch 16, fp32", "batch 16"),
    ("tree_attention", "1 nodes, batch 8, past 4096, bf16, bhld", "one token behind 4096, batch 8"),
    ("count_tokens", "llama-3 128256, batch 16, K 5, 1000 tokens", "batch 16"),
)


class Highlight(NamedTuple):
    """A case, its machine and its name for readers."""

    task: str
    machine: str
    entry: Entry


def highlights(contents: list[Row]) -> list[Highlight]:
    """The cases of CASES that were measured, each by the first machine and backend that has rivals in it."""
    found = {}
    for content in reversed(contents):
        for entry in reversed(list(entries(content))):
            if entry.rivals:
                found[entry.op, entry.case] = (machine_name(content), entry)
    return [Highlight(task, *found[op, case]) for op, case, task in CASES if (op, case) in found]


def readme_table(contents: list[Row]) -> list[str]:
    """Six to eight rows: our time, the fastest rival and the slowest one."""
    rows = []
    for task, machine, entry in highlights(contents):
        (fast, ratio), (slow, most) = entry.rivals[0], entry.rivals[-1]
        slowest = f"{slow} {multiple(most)}" if len(entry.rivals) > 1 else ""
        ours = duration(entry.ours["p50_us"])
        rows.append([f"`{entry.op}`: {task}", ours, f"{fast} {multiple(ratio)}", slowest, machine])
    return markdown(["case", "ours", "fastest rival", "slowest rival", "machine"], rows, right=(1,))
