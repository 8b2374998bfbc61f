"""Tensor parallelism: each rank holds a part of the vocabulary, and ranks exchange numbers about rows, never rows.

* `group.py`: who holds which ids, and the one collective.
* `residual.py`: checks what residual_probs and residual_sample share, group included.
* `thresholds.py`: distributions of sharded rows. Without filters a maximum and a sum; thresholds of filters by two
further exchanges.

The rules are those of the references, which ask a `Vocabulary` for sums and draws. Every rank computes the same numbers
from the same messages in the same order, so all return the same bits. Plain PyTorch on any device; nothing waits for
the device.
"""

from .group import shards_of
from .residual import check_residual

__all__ = ["check_residual", "shards_of"]
