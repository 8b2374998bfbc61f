"""A transformers cache in static buffers: rows are written in place, a tree is compacted, a step is rolled back.

Request b owns slots 0 .. capacity - 1 of every buffer ``[batch, head, length, dim]``. Its first lengths[b] slots hold
committed tokens; what forwards have written since the last `commit` lies behind them, at a distance that is the same
for every request and known to the host. So each request has a length of its own and nothing waits for the device.
"""

try:
    from transformers import __version__ as _version
    from transformers.cache_utils import CacheLayerMixin as _CacheLayerMixin  # noqa: F401
except ImportError as error:
    raise ImportError("specdec_loop needs transformers 5.16 or later: pip install 'transformers>=5.16'") from error
if tuple(map(int, _version.split(".")[:2])) < (5, 16):
    raise ImportError(f"specdec_loop needs transformers 5.16 or later, got {_version}")

from .cache import TreeCache
from .support import check_model, has_states

__all__ = ["TreeCache", "check_model", "has_states"]
