"""The same bits a thousand times, on several streams and in a graph: what `make race` looks for, on a GPU."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import RngKey, Sampling, sample, verify_chain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: a host runs one thread at a time"),
]


REPEATS = 1000
VOCAB = 128256  # eight blocks or more leave a digest of each row


def rng_of(batch: int) -> RngKey:
    i = torch.arange(batch, device="cuda")
    return RngKey(seed=i * 7919 + 1, position=i % 512, step=torch.zeros_like(i))


@pytest.mark.parametrize("batch", [1, 7, 256])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.95}], ids=["plain", "filters"])
def test_a_thousand_repeats_give_the_same_bits(batch: int, filters: dict[str, float]) -> None:
    """A part that is not yet visible would change a sum or a winner."""
    logits = 3 * torch.randn(batch, VOCAB, device="cuda", dtype=torch.bfloat16)
    sampling = Sampling.full(batch, temperature=0.8, **filters, device="cuda")
    rng = rng_of(batch)
    first = sample(logits, sampling=sampling, rng=rng, purpose="draft", backend="cuda")
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS if batch < 256 else REPEATS // 5):
        again = sample(logits, sampling=sampling, rng=rng, purpose="draft", backend="cuda")
        for a, b in zip(first, again, strict=True):
            if a is not None and b is not None:
                differing += (a != b).sum()
    assert int(differing) == 0


def test_streams_do_not_share_scratch() -> None:
    """Two streams run the same op at once."""
    batch, draft, vocab = 16, 4, VOCAB // 4
    target = 3 * torch.randn(batch, draft + 1, vocab, device="cuda")
    drafted = target[:, :draft] + torch.randn(batch, draft, vocab, device="cuda")
    ids = drafted.argmax(-1)
    sampling = Sampling.full(batch, temperature=0.9, device="cuda")
    arguments = {"sampling": sampling, "draft_sampling": sampling, "rng": rng_of(batch), "backend": "cuda"}
    expected = verify_chain(ids, target, drafted, **arguments)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for i in range(REPEATS // 5):
        with torch.cuda.stream(streams[i % 2]):
            results.append(verify_chain(ids, target, drafted, **arguments))
    torch.cuda.synchronize()
    for result in results:
        assert torch.equal(result.token_ids, expected.token_ids)
        assert torch.equal(result.status, expected.status)


def test_a_graph_replays_beside_its_stream() -> None:
    """A capture brings its own scratch, so replays and eager calls may overlap."""
    batch, vocab = 8, VOCAB // 2 - 7  # rows that are not 16-byte aligned
    logits = 3 * torch.randn(batch, vocab, device="cuda", dtype=torch.float16)
    sampling, rng = Sampling.full(batch, temperature=0.7, top_p=0.9, device="cuda"), rng_of(batch)

    def call() -> torch.Tensor:
        return sample(logits, sampling=sampling, rng=rng, purpose="target", backend="cuda").token_ids

    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(REPEATS // 10):
        graph.replay()
        assert torch.equal(call(), expected)
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
