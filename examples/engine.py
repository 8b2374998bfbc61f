"""A minimal engine, as a template for your own: continuous batching, a paged cache, concurrent requests that speculate.

Requests come and go between steps. A step runs, in one forward, a piece of each new request's prompt and the last token
with its drafts of each other one; attention reads the pages where they lie. Then one call verifies all requests, each
with its own sampling and its own random numbers, and one takes back what was refused. Drafts are looked up in the text;
any drafter will do, for a text depends neither on its drafts nor on the other requests.

python examples/engine.py --concurrent 4 --temperature 0.8 'import os' 'class Reader'
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from specdec_kernels import CacheLayout, RngKey, Sampling, rollback, tree_attention, tree_layout, verify_chain

PIECE = 64  # most tokens of a prompt in one step, so that a long one does not hold up the others


@dataclass
class Request:
    """A request and its state."""

    prompt: list[int]
    limit: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    tokens: list[int] = field(default_factory=list)  # prompt and text
    cached: int = 0  # tokens that have rows in the pages
    accepted: list[int] = field(default_factory=list)  # drafts that were kept in each step
    slot: int = -1  # of the block table, while it runs
    is_finished: bool = False
    is_failed: bool = False  # its logits held no token that could be drawn, NaN perhaps

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def text(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Step(NamedTuple):
    """Inputs of attention in a forward."""

    pages: Pages
    table: Tensor  # pages of each request that takes part
    lengths: Tensor
    ancestors: Tensor  # of a chain: a node attends all before it
    nodes: Tensor  # places of the nodes that are there, among [batch, nodes]
    rows: Tensor  # and of their rows, among all slots of the pool


class Pages:
    """Keys and values of all requests in one pool, and which pages are whose."""

    def __init__(self, model: Any, pages: int, page_size: int, slots: int, longest: int) -> None:
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, pages, page_size, config.num_key_value_heads, dim)
        self.keys, self.values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        self.size, self.free = page_size, list(range(pages))
        self.table = torch.full((slots, self.needed(longest)), -1, dtype=torch.int32, device=model.device)
        self.layout = CacheLayout([*self.keys, *self.values], "nhd", self.table)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def grow(self, slot: int, tokens: int) -> None:
        """Give a request pages for so many tokens."""
        for i in range(int((self.table[slot] >= 0).sum()), self.needed(tokens)):
            self.table[slot, i] = self.free.pop()

    def keep(self, slots: Tensor, lengths: Tensor, accepted: Tensor, tail: int) -> None:
        """Take back what a step wrote behind its accepted tokens."""
        table = self.table[slots]
        result = rollback(self.layout.with_block_table(table), lengths, accepted, max_tail=tail)
        self.table[slots] = table
        self.free += result.freed_pages[: int(result.num_freed)].tolist()

    def release(self, slot: int) -> None:
        """A request has left."""
        self.free += self.table[slot][self.table[slot] >= 0].tolist()
        self.table[slot] = -1


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, step: Step, **options: Any
) -> tuple[Tensor, None]:
    """Write the new rows to their pages, then attend them and what lies before them."""
    keys, values = step.pages.keys[module.layer_idx], step.pages.values[module.layer_idx]
    for pool, new in ((keys, key), (values, value)):
        pool.flatten(0, 1)[step.rows] = new.transpose(1, 2).flatten(0, 1)[step.nodes]
    scale, window = options.get("scaling"), options.get("sliding_window") or 0
    place = {"format": "nhd", "block_table": step.table, "scale": scale, "window": window}
    attended = tree_attention(query.transpose(1, 2), keys, values, step.ancestors, step.lengths, **place)
    return attended.output, None


AttentionInterface.register("specdec_paged", paged_attention)


class Engine:
    """Serves requests with a transformers model whose layers all attend."""

    def __init__(self, model: Any, slots: int = 8, pages: int = 256, page_size: int = 16, drafts: int = 4) -> None:
        model.set_attn_implementation("specdec_paged")
        self.model, self.drafts, eos = model, drafts, model.generation_config.eos_token_id
        self.ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.longest = min(pages * page_size, model.config.max_position_embeddings)
        self.pages = Pages(model, pages, page_size, slots, self.longest)
        self.slots, self.promised = list(range(slots)), 0  # pages that running requests may come to need
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(self, request: Request) -> Request:
        most = len(request.prompt) + request.limit
        if not request.prompt or request.limit < 1 or most > self.longest:
            raise ValueError(f"a prompt and a limit of at least 1 and together at most {self.longest}, got {most}")
        self.waiting.append(request)
        return request

    def _need(self, request: Request) -> int:
        return self.pages.needed(len(request.prompt) + request.limit)

    def _admit(self) -> None:
        """In order of arrival, while there are slots and pages for all that a request may come to."""
        total = self.pages.keys.shape[1]
        while self.waiting and self.slots and self.promised + self._need(self.waiting[0]) <= total:
            request = self.waiting.popleft()
            request.slot, self.promised = self.slots.pop(), self.promised + self._need(request)
            self.running.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run all requests a step further; returns those that it finished."""
        self._admit()
        if not self.running:
            return []
        pieces = [r.tokens[r.cached : r.cached + PIECE] for r in self.running]
        # A piece that reaches the last token is followed by drafts; how many may not depend on what will be drawn.
        speaks = [r.cached + len(piece) == len(r.tokens) for r, piece in zip(self.running, pieces, strict=True)]
        room = [min(self.drafts, r.limit - len(r.text) - 1) for r in self.running]
        drafts = [lookup(r.tokens, n) if s else [] for r, n, s in zip(self.running, room, speaks, strict=True)]
        hidden, slots, lengths = self._forward([p + d for p, d in zip(pieces, drafts, strict=True)])
        accepted = torch.tensor([len(piece) - 1 for piece in pieces], dtype=torch.int32, device=hidden.device)
        said = [b for b, s in enumerate(speaks) if s]
        new: list[list[int] | None] = [None] * len(self.running)
        if said:
            rows = [hidden[b, len(pieces[b]) - 1 :][: len(drafts[b]) + 1] for b in said]
            logits = self.model.get_output_embeddings()(torch.cat(rows))
            verdict = self._verify([self.running[b] for b in said], [drafts[b] for b in said], logits)
            accepted[said] += verdict.num_accepted
            for b, ids in zip(said, verdict.token_ids.tolist(), strict=True):  # the one wait for the device
                new[b] = [i for i in ids if i >= 0]
        self.pages.keep(slots, lengths, accepted, hidden.shape[1])
        for request, piece, ids in zip(self.running, pieces, new, strict=True):
            self._commit(request, len(piece), ids)
        finished = [r for r in self.running if r.is_finished]
        self.running = [r for r in self.running if not r.is_finished]
        return finished

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.waiting or self.running:
            self.step()

    def _forward(self, nodes: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states ``[batch, nodes, hidden]`` of ragged chains, their slots and lengths."""
        device, width = self.model.device, max(map(len, nodes))
        for request, chain in zip(self.running, nodes, strict=True):
            self.pages.grow(request.slot, request.cached + len(chain))
        ids = torch.tensor([chain + [0] * (width - len(chain)) for chain in nodes], device=device)
        counts, lengths, slots = (
            torch.tensor(numbers, device=device)
            for numbers in (list(map(len, nodes)), [r.cached for r in self.running], [r.slot for r in self.running])
        )
        offsets = torch.arange(width, device=device)
        is_node, places = offsets < counts[:, None], lengths[:, None] + offsets
        table = self.pages.table[slots]
        pages = table.gather(1, (places // self.pages.size).clamp(max=table.shape[1] - 1)).long()
        ancestors = tree_layout(torch.where(is_node, offsets - 1, -1)).ancestors
        there = is_node.flatten().nonzero().flatten()
        rows = (pages * self.pages.size + places % self.pages.size).flatten()[there]
        step = Step(self.pages, table, lengths, ancestors, there, rows)
        decoder = self.model.get_decoder()
        out = decoder(ids, position_ids=places, use_cache=False, step=step)
        return out.last_hidden_state, slots, lengths

    def _verify(self, requests: list[Request], drafts: list[list[int]], logits: Tensor) -> Any:
        """Verify flat drafts; token i of a request is drawn with the random numbers of its seed and position i."""

        def each(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(r, name) for r in requests], dtype=dtype, device=logits.device)

        ends = torch.tensor([0, *map(len, drafts)], device=logits.device).cumsum(0).int()
        positions = torch.tensor([len(r.tokens) for r in requests], device=logits.device)
        return verify_chain(
            torch.tensor([i for chain in drafts for i in chain], dtype=torch.int64, device=logits.device),
            logits,
            cu_draft=ends,
            max_draft=max(map(len, drafts)),
            sampling=Sampling(
                each("temperature", torch.float32), each("top_k", torch.int32),
                each("top_p", torch.float32), each("min_p", torch.float32),
            ),
            rng=RngKey(each("seed", torch.int64), positions),
            rule="match",
        )  # fmt: skip

    def _commit(self, request: Request, piece: int, new: list[int] | None) -> None:
        """Append what was said, up to the first end token; None: the prompt is not read yet."""
        request.cached += piece + max(len(new or ()) - 1, 0)
        if new is None:
            return
        request.accepted.append(max(len(new) - 1, 0))
        end = next((i + 1 for i, token in enumerate(new) if token in self.ends), None)
        request.tokens += new[:end]
        request.is_failed = not new
        if end is not None or request.is_failed or len(request.text) >= request.limit:
            request.is_finished = True
            self.pages.release(request.slot)
            self.slots.append(request.slot)
            self.promised -= self._need(request)


def lookup(tokens: list[int], count: int, longest: int = 3) -> list[int]:
    """The tokens that followed an earlier occurrence of the last few tokens."""
    for n in range(longest, 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1) if count else ():
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + count]
    return []


def main() -> None:
    models = Path(__file__).resolve().parent.parent / "python/models"
    known = ["import os\nimport sys\n", "class Reader:\n    def __init__(", "def main():\n    parser = ", "try:\n    "]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=known)
    parser.add_argument("--model", default=models / "target", help="folder of a transformers causal LM")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--concurrent", type=int, default=3, help="requests that run at once; the others wait")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--drafts", type=int, default=4, help="of a step; 0: plain decoding")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    engine = Engine(model, slots=args.concurrent, drafts=args.drafts)
    requests = [
        engine.submit(Request(tokenizer(prompt)["input_ids"], args.tokens, args.temperature, seed=i))
        for i, prompt in enumerate(args.prompts)
    ]
    start = time.perf_counter()
    engine.run()
    seconds = time.perf_counter() - start
    for request in requests:
        steps = len(request.accepted)
        print(
            f"--- {len(request.text)} tokens in {steps} steps, {sum(request.accepted) / steps:.2f} drafts kept a step"
        )
        print(tokenizer.decode(request.tokens))
    said, kept = (
        sum(len(x) for x in numbers) for numbers in ([r.text for r in requests], [r.accepted for r in requests])
    )
    print(f"--- {said / seconds:.1f} tokens/s, {said / kept:.2f} tokens a request and step")


if __name__ == "__main__":
    main()
