"""The codes of `specdec_kernels._codes` as constants of kernels."""

import triton.language as tl

from .. import _codes

S_TARGET, S_DRAFT, S_ID, S_EMPTY, S_ZERO, S_LAYOUT, S_SAMPLING = (tl.constexpr(bit.value) for bit in _codes.Status)
TARGET_PURPOSE, COIN_PURPOSE, RESIDUAL_PURPOSE, DRAFT_PURPOSE = map(tl.constexpr, _codes.PURPOSES.values())
NO_LOGPROBS, PROCESSED_LOGPROBS, RAW_LOGPROBS = map(tl.constexpr, _codes.LOGPROBS.values())
