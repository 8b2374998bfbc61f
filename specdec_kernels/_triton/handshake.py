"""The one cross-block handshake: programs publish, take a ticket, and the last one merges."""

import triton
import triton.language as tl


@triton.jit
def arrive(counter, expected):
    """Whether this program is the last of `expected`; then all that the others stored is visible to it.

    The barrier orders the stores of all threads before the one that releases; the acquire (and the barrier after it)
    orders the loads of all threads after it. The last program leaves the counter at zero for the next launch.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if is_last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return is_last
