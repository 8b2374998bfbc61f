"""Pages: leases, sharing, and what is forgotten where there is no room."""

from __future__ import annotations

import random

import torch
from transformers import LlamaConfig

from specdec_loop.serve.pages import Lease, Pages

CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=1)


def pool(count: int, size: int = 4) -> Pages:
    return Pages(CONFIG, count, size, dtype=torch.float32, device=torch.device("cpu"))


def leased(pages: Pages, tokens: list[int], most: int) -> Lease:
    lease = pages.lease(tokens, most)
    assert lease is not None
    return lease


def test_full_pages_are_found_by_all_tokens_before_their_end() -> None:
    pages = pool(8)
    first = leased(pages, [1, 2, 3, 4, 5, 6, 7, 8, 9], 12)
    assert (first.shared, len(first.pages)) == (0, 3)
    pages.learn(first, [1, 2, 3, 4, 5, 6, 7])  # the second page is not full
    assert leased(pages, [1, 2, 3, 4, 5, 6, 7, 8, 9], 9).shared == 4
    pages.learn(first, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    for tokens, shared in (([1, 2, 3, 4, 5, 6, 7, 8, 0], 8), ([1, 2, 3, 4, 5, 6, 7, 8], 4), ([9, 2, 3, 4, 5, 6], 0)):
        lease = leased(pages, tokens, 9)
        assert lease.shared == shared and lease.pages[: shared // 4] == first.pages[: shared // 4]
        pages.release(lease)


def test_a_second_page_is_not_found_behind_another_first_one() -> None:
    pages = pool(8)
    for tokens in ([1, 1, 1, 1, 5, 5, 5, 5], [2, 2, 2, 2, 6, 6, 6, 6]):
        pages.learn(leased(pages, tokens, 8), tokens)
    assert leased(pages, [1, 1, 1, 1, 6, 6, 6, 6, 0], 9).shared == 4


def test_pages_without_users_stay_until_their_place_is_needed_the_oldest_first() -> None:
    pages = pool(4)
    old, new = [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9]
    for tokens in (old, new):
        lease = leased(pages, tokens, len(tokens))
        pages.learn(lease, tokens)
        pages.release(lease)
    assert pages.used == 0
    big = leased(pages, [0], 8)  # one page was free: of the oldest text the last page goes
    assert pages.lease([*old, 0], 13) is None and pages.used == 2  # its first page is there, but not three more
    pages.release(big)
    assert leased(pages, [*old, 0], 9).shared == 4
    pages = pool(3)
    for tokens in (old, new):
        lease = leased(pages, tokens, len(tokens))
        pages.learn(lease, tokens)
        pages.release(lease)
    pages.release(leased(pages, [0], 8))
    assert leased(pages, [*new, 0], 5).shared == 4


def test_what_a_failed_request_wrote_is_not_found() -> None:
    pages = pool(8)
    good = leased(pages, [1, 2, 3, 4, 5], 8)
    pages.learn(good, [1, 2, 3, 4])
    bad = leased(pages, [1, 2, 3, 4, 5, 6, 7, 8, 9], 12)
    pages.learn(bad, [1, 2, 3, 4, 5, 6, 7, 8])
    pages.release(bad, forget=True)
    assert leased(pages, [1, 2, 3, 4, 5, 6, 7, 8, 9], 9).shared == 4


def test_any_order_of_leases_keeps_every_page_in_one_place() -> None:
    rng, pages, held = random.Random(3), pool(12, 2), []
    for _ in range(3000):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        lease = pages.lease(tokens, len(tokens) + rng.randrange(4))
        if lease is not None:
            assert lease.shared < len(tokens) and len(set(lease.pages)) == len(lease.pages)
            own = lease.pages[lease.shared // 2 :]
            assert not any(set(own) & set(other.pages) for other, _ in held)
            pages.learn(lease, tokens)
            held.append((lease, tokens))
        while held and (lease is None or rng.random() < 0.4):
            gone, _ = held.pop(rng.randrange(len(held)))
            pages.release(gone, forget=rng.random() < 0.1)
            lease = gone
        assert pages.used == len({page for other, _ in held for page in other.pages})
