"""Markdown tables of docs/benchmarks.md and README.md, from the rows of bench/results/*.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

from .filter_traffic import VOCABULARIES
from .rivals import rivals

Row = dict[str, Any]
STATS = "draft_stats"
OPS = {
    "verify_chain": "Accepts a prefix of each request's drafted tokens and draws the next token. "
    "*With draft_stats*: the statistics that `sample` returned when it drew the drafts are passed in, so the draft "
    "rows are read only where a token was rejected.",
    "sample": "Draws one token from each row of logits.",
    "token_logprobs": "Gives the log-probability and rank of a token in each row, and the row's 20 most likely ids.",
    "verify_tree": "Accepts a path of each request's tree of drafted tokens and draws the next token.",
    "acceptance_ratios": "Computes min(1, p / q) at each drafted token and sum min(p, q) over the vocabulary.",
    "residual_probs": "Writes the distribution from which a rejected token is redrawn.",
    "residual_sample": "Draws from that distribution without writing it.",
    "allocate_drafts": "Chooses how many drafts each request verifies, under one budget and a table of costs.",
    "edit_rows": "Lists what biases, penalties and bans change of each row, at every drafted position.",
    "count_tokens": "Counts the tokens that a step emitted, for penalties.",
    "compact_cache": "Moves the accepted path's rows of a KV cache together, in all layers.",
    "rollback": "Frees the cache pages behind the accepted path.",
    "gather_nodes": "Gathers the features of the accepted path.",
    "select_state": "Selects the recurrent state after the last accepted token.",
    "advance_state": "Advances the recurrent states of a gated delta rule over the root and the accepted drafts.",
    "advance_window": "Advances the windows of short convolutions over the root and the accepted drafts.",
    "tree_layout": "Computes depths, positions, links and packed ancestors of the trees of a batch.",
    "tree_mask": "Writes the attention masks of the trees, in an engine's format.",
    "select_tree": "Keeps the best nodes of a drafted tree, as EAGLE-2 does.",
    "tree_from_sequences": "Builds one tree (a trie) from many drafted sequences.",
    "tree_from_marginals": "Builds the likeliest tree of drafts whose positions are predicted at once.",
    "tree_attention": "Attends from the nodes of a tree to a KV cache and to their ancestors.",
    "tree_cache": "A decode step of a transformers model with each cache, and the cache's own share of that step.",
    "linear": "Multiplies a few rows by a weight matrix, as a decode step on a CPU does.",
}
# Contenders that are no module of bench/rivals: plain code written for one op.
PLAIN_RIVALS = {
    "EAGLE's loop": "EAGLE's published verification of a tree: a Python loop over nodes",
    "lazy walk": "a walk through the tree in PyTorch that reads only the rows it visits",
    "Medusa's PyTorch": "Medusa's published typical acceptance",
    "Medusa's Python": "Medusa's published construction of tree buffers",
    "EAGLE's PyTorch": "EAGLE-2's published selection of nodes",
    "heapq": "a heap of prefixes per request, on the host, as engines build such trees",
    "Python dictionaries": "a trie of Python dictionaries",
    "log_softmax + topk": "`log_softmax` of float32 rows, `topk`, `gather`, and a count of larger logits",
    "dense PyTorch": "a float32 copy of all rows, changed in place as engines do it",
    "cat + gather": "`torch.cat` of windows and inputs, one `torch.gather`, one copy",
    "sort and mask": "`cumprod`, `sort` and a boolean mask, which waits for the device",
    "dense counts": "`scatter_add_` into counts of the whole vocabulary",
    "loop over requests": "one PyTorch copy per request",
    "gather/scatter a layer": "`gather` and `scatter_`, once per layer",
    "index a layer": "indexing, once per layer",
    "torch.gather": "one `torch.gather`",
    "SDPA, dense mask": "`scaled_dot_product_attention` with a dense mask, keys and values shared by query heads",
    "transformers' SDPA": "the attention of transformers, which copies keys and values for each query head",
    "specdec_loop's SDPA": "this package's `specdec_loop.attention`: SDPA with the query heads of a group as rows",
    "plain PyTorch": "matrix products, softmax and indexing written out",
    "DynamicCache": "the default cache of transformers",
    "torch": "`torch.nn.functional.linear`",
}


# Names in result files that a reader would not understand.
LABELS = {
    "eager": "PyTorch",
    "lazy eager": "lean PyTorch",
    "topk-first eager": "PyTorch top-k first",
    "compiled eager": "torch.compile",
    "compiled lazy": "lean torch.compile",
    "lazy walk": "PyTorch walk",
    "SDPA, dense mask": "SDPA with a mask",
    "the loop's `grouped_sdpa`": "specdec_loop's SDPA",
}


class Entry(NamedTuple):
    """One backend of ours in one case, beside everything else that ran in the case."""

    op: str
    case: str
    ours: Row
    with_stats: Row | None
    rivals: list[tuple[str, float]]  # (name, its time divided by ours), fastest first


def label(row: Row) -> str:
    """A contender's name on the page; a call that no CUDA graph can hold says so."""
    name = str(row["contender"])
    return LABELS.get(name, name) + (" (launched)" if row.get("timed") == "launches" else "")


def ratio(row: Row, ours: Row) -> float:
    """Time of a rival over ours: both replayed from a graph, or both launched where one of them cannot be."""
    same = "p50_us" if row.get("timed") == ours.get("timed") else "launched_p50_us"
    return float(row[same] / ours[same])


def entries(content: Row) -> list[Entry]:
    """Every case of a result file that has a timed backend of ours."""
    cases: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in content["rows"]:
        if "p50_us" in row:
            cases[row["op"], row["case"]][row["contender"]] = row
    found = []
    for (op, case), rows in cases.items():
        others = [row for row in rows.values() if not row["is_ours"]]
        for ours in (row for row in rows.values() if row["is_ours"] and STATS not in row["contender"]):
            ratios = sorted(((label(row), ratio(row, ours)) for row in others), key=lambda r: r[1])
            found.append(Entry(op, case, ours, rows.get(f"{ours['contender']} + {STATS}"), ratios))
    return found


def is_gpu(content: Row) -> bool:
    """Whether a file's figures come from a GPU."""
    return "ceilings" in content


def machine_name(content: Row) -> str:
    """The machine of a result file, in words."""
    facts = content["machine"]
    return str(facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores")


def duration(microseconds: float) -> str:
    """Three figures and a unit."""
    value, unit = (microseconds / 1000, "ms") if microseconds >= 1000 else (microseconds, "µs")
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def multiple(ratio: float) -> str:
    """Two figures, as a factor; bold where the rival is faster."""
    shown = f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"
    return f"**{shown}**" if ratio < 1 else shown


def markdown(head: list[str], rows: list[list[str]], right: Collection[int] = ()) -> list[str]:
    """A table; columns of numbers, `right`, are aligned to the right."""
    rule = "|".join("--:" if column in right else "---" for column in range(len(head)))
    return ["", f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def op_table(content: Row, some: list[Entry]) -> list[str]:
    """The cases of one op on one machine."""
    many, stats = len({e.ours["contender"] for e in some}) > 1, any(e.with_stats for e in some)
    head = ["case", *(["backend"] if many else []), "ours", *([f"with {STATS}"] if stats else [])]
    head += ["share of copy bandwidth"] if is_gpu(content) else []
    rows = []
    for entry in some:
        cells = [entry.case, *([entry.ours["contender"]] if many else []), duration(entry.ours["p50_us"])]
        cells += [duration(entry.with_stats["p50_us"]) if entry.with_stats else ""] if stats else []
        cells += [f"{entry.ours['of_copy']:.0%}" if "of_copy" in entry.ours else ""] if is_gpu(content) else []
        rows.append([*cells, ", ".join(f"{name} {multiple(ratio)}" for name, ratio in entry.rivals) or "none timed"])
    numbers = range(head.index("ours"), len(head))
    return markdown([*head, "rivals, fastest first (their time / ours)"], rows, right=numbers)


def commits(rows: list[Row]) -> str:
    """Commits of the measured sources."""
    return ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in rows))


def op_sections(contents: list[Row]) -> list[str]:
    """A section for each op, a table for each machine that measured it."""
    found = [(content, entries(content)) for content in contents]
    measured = dict.fromkeys(entry.op for _, some in found for entry in some)
    lines: list[str] = []
    for op in [*(op for op in OPS if op in measured), *(op for op in measured if op not in OPS)]:
        lines += ["", f"### {op}", "", OPS.get(op, "")]
        if op == "tree_cache":
            lines += ["", "![Time of a decode step over the length of the context](benchmarks/caches.png)"]
        for content, all_entries in found:
            some = [entry for entry in all_entries if entry.op == op]
            if some:
                backend = some[0].ours["contender"]
                ours = f", backend `{backend}`" if len({e.ours["contender"] for e in some}) == 1 else ""
                commit = commits([row for row in content["rows"] if row["op"] == op])
                lines += ["", f"{machine_name(content)}{ours} (commit {commit}):", *op_table(content, some)]
    return lines


def machine_table(contents: list[Row]) -> list[str]:
    """Machines, what they measured, and the software on them."""
    rows = []
    for content in contents:
        facts, versions = content["machine"], content["rows"][0]["versions"]
        software = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "specdec_kernels")
        ops = ", ".join(f"`{op}`" for op in dict.fromkeys(row["op"] for row in content["rows"]))
        size = f"{facts['gpu_memory_gib']} GiB" if "gpu" in facts else f"{facts['simd']}, {facts['memory_gib']} GiB"
        if is_gpu(content):
            size += f", driver {facts['driver']}, copies {content['ceilings']['copy_gb_per_s']} GB/s"
        rows.append([machine_name(content), size, ops, software])
    return markdown(["machine", "SIMD, memory", "ops", "software"], rows)


def traffic_table(content: Row) -> list[str]:
    """Bytes moved as multiples of the minimum: ours with the budget, rivals where they were metered."""
    cases: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in content["rows"]:
        if STATS not in row["contender"]:
            cases[row["op"], row["case"]][row["contender"]] = row
    rows = []
    for (op, case), found in cases.items():
        budget = next((f"{row['budget']:g}" for row in found.values() if row["budget"]), "")
        ours = [f"{found[name]['times_min']:.3g}" if name in found else "" for name in ("triton", "cuda_host")]
        others = sorted((row["times_min"], label(row)) for row in found.values() if not row["is_ours"])
        told = ", ".join(f"{name} {times:.3g}" for times, name in others)
        rows.append([f"`{op}` {case}", budget, *ours, told])
    return markdown(["case", "budget", "triton", "cuda", "rivals, fewest bytes first"], rows, right=(1, 2, 3))


def filter_table(content: Row) -> list[str]:
    """Mean and worst row of each filter at real vocabularies; bold over budget."""
    cases: dict[tuple[str, float, str], dict[tuple[int, str], Row]] = defaultdict(dict)
    for row in content["rows"]:
        cases[row["filters"], row["temperature"], row["rows"]][row["vocab"], row["contender"]] = row
    columns = [(vocab, backend) for vocab in VOCABULARIES for backend in ("triton", "cuda_host")]
    lines = []
    for (filters, temperature, shape), found in cases.items():
        cells = [filters, f"{temperature:g}", shape, f"{next(iter(found.values()))['budget']:g}"]
        lines.append(cells + [mean_and_worst(found.get(column)) for column in columns])
    head = ["filter", "T", "rows", "budget", *(f"{b.removesuffix('_host')} {v}" for v, b in columns)]
    return markdown(head, lines, right=range(3, 8))


def mean_and_worst(row: Row | None) -> str:
    """Two multiples of MIN."""
    if row is None:
        return "not metered"
    mean, worst = (f"{row[f'{kind}_times_min']:.3g}" for kind in ("mean", "worst"))
    shown = mean if mean == worst else f"{mean}, worst {worst}"
    return f"**{shown}**" if row["mean_times_min"] > row["budget"] else shown


def rival_table() -> list[str]:
    """Who the rivals are."""
    known = {rival.NAME: rival.WHY for rival in rivals()} | PLAIN_RIVALS
    return markdown(["rival", "meaning"], [[LABELS.get(name, name), why] for name, why in known.items()])
