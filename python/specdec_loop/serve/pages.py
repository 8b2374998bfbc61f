"""Keys and values of all requests in one pool of pages; texts that begin alike share pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Key = tuple[int, tuple[int, ...]]  # name of the page before, 0 before the first, and tokens of this one


@dataclass
class Lease:
    """Pages of a request, in the order of its tokens.

    Attributes:
        pages: the first ones may be shared, the others are its own.
        shared: how many tokens had rows in them from the start.
        known: how many of the first pages others may find.
        name: of the last of these.
    """

    pages: list[int]
    shared: int
    known: int
    name: int


def block_table(leases: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Pages of requests as int32 ``[batch, most]``, -1 behind those of each."""
    most = max(map(len, leases))
    rows = [[*pages, *[-1] * (most - len(pages))] for pages in leases]
    return torch.tensor(rows, dtype=torch.int32, device=device)


class Pages:
    """A pool of pages; a full page of a text is found by all tokens up to its end.

    A page that nobody uses any more is kept until its place is needed, the one left longest ago first. Pages hold rows
    of committed tokens alone where they are shared: rejected drafts are written behind them.
    """

    def __init__(self, config: Any, count: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the pool.

        Args:
            config: of the model.
            count: pages.
            size: tokens of a page.
            dtype: of keys and values.
            device: of keys and values.
        """
        config = config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, count, size, heads, dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.count, self.size = count, size
        self._free = list(range(count))
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages without users, the oldest first
        self._users = [0] * count
        self._keys: dict[int, Key] = {}
        self._known: dict[Key, tuple[int, int]] = {}  # page, and its name
        self._names = 0  # given so far; a name is never given again, so that a page does not outlive those before it

    @property
    def used(self) -> int:
        """Pages of running requests."""
        return self.count - len(self._free) - len(self._idle)

    def needed(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.size)

    def lease(self, tokens: Sequence[int], most: int, *, share: bool = True) -> Lease | None:
        """Pages for a text that begins with `tokens` and may come to `most`; None: there are not enough now.

        The last token's row is never a shared one: somebody has to run it.
        """
        lease = self._find(tokens) if share else Lease([], 0, 0, 0)
        waking = [page for page in lease.pages if not self._users[page]]
        lacking = self.needed(most) - len(lease.pages)
        if lacking > len(self._free) + len(self._idle) - len(waking):
            return None
        for page in lease.pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        for _ in range(lacking):
            page = self._free.pop() if self._free else self._evict()
            self._users[page] = 1
            lease.pages.append(page)
        return lease

    def learn(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Let others find the full pages of these tokens, all of which have their rows."""
        for end in range((lease.known + 1) * self.size, len(tokens) + 1, self.size):
            key = lease.name, tuple(tokens[end - self.size : end])
            page = lease.pages[lease.known]
            if key not in self._known:
                self._names += 1
                self._keys[page], self._known[key] = key, (page, self._names)
            lease.known, lease.name = lease.known + 1, self._known[key][1]

    def release(self, lease: Lease, *, forget: bool = False) -> None:
        """A request has left; `forget`: its rows may be bad, and nobody else may find those that are its own."""
        for i, page in reversed(list(enumerate(lease.pages))):  # the last ones are taken again first
            self._users[page] -= 1
            if forget and i * self.size >= lease.shared and page in self._keys:
                del self._known[self._keys.pop(page)]
            if not self._users[page]:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _find(self, tokens: Sequence[int]) -> Lease:
        lease = Lease([], 0, 0, 0)
        for end in range(self.size, len(tokens), self.size):
            found = self._known.get((lease.name, tuple(tokens[end - self.size : end])))
            if found is None:
                break
            lease.pages.append(found[0])
            lease.name = found[1]
        lease.known = len(lease.pages)
        lease.shared = lease.known * self.size
        return lease

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._known[self._keys.pop(page)]
        return page
