"""Tensor parallelism: each rank holds a part of the vocabulary, and ranks exchange numbers about rows, never rows.

* `group.py`: who holds which ids, and the one collective.
* `agreed.py`: distributions of sharded rows. Without filters a maximum and a sum; thresholds of filters by two
further exchanges.
* `races.py`: the winner of a race that every rank ran over its own ids.
* `nodes.py`, `rules.py`, `multi_round.py`: rules of chains and trees over the exchanged numbers. A chain is a tree.
* `verify.py`, `sample.py`: the calls.

Every rank computes the same numbers from the same messages in the same order, so all return the same bits. Plain
PyTorch on any device; nothing waits for the device.
"""

from .group import shards_of
from .sample import sample
from .verify import verify_chain, verify_tree

__all__ = ["sample", "shards_of", "verify_chain", "verify_tree"]
