"""A batch of drafted tokens is verified: which are kept, which token follows, and how long that takes.

Run it with `make demo`. Logits are made up, in the shape of a language model's: a few likely ids, a long tail.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from specdec_kernels import ChainResult, RngKey, Sampling, available_backends, sample, verify_chain

BATCH, DRAFT, VOCAB = 16, 5, 128256  # vocabulary of Llama 3
TEMPERATURE, ROUNDS = 0.8, 15


def model_like_rows(rows: int, device: str) -> Tensor:
    """Gaussian tail, and 64 ids a row that stand out of it by an amount that falls with their rank."""
    logits = torch.randn(rows, VOCAB, device=device)
    ids = torch.randint(VOCAB, (rows, 64), device=device)
    peaks = 14.0 - 1.5 * torch.arange(1, 65, device=device).log2() + torch.randn(rows, 64, device=device)
    return logits.scatter_(1, ids, peaks)


def drafted(target: Tensor, sampling: Sampling, rng: RngKey) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Draft logits near the target's, the ids drawn from them, and what `sample` knows about each row."""
    draft = target[:, :DRAFT] + 0.9 * torch.randn(BATCH, DRAFT, VOCAB, device=target.device)
    drawn = [
        sample(draft[:, i], sampling=sampling, rng=rng._replace(position=rng.position + i), purpose="draft")
        for i in range(DRAFT)
    ]
    stats = (torch.stack([d.logsumexp for d in drawn], 1), torch.stack([d.threshold for d in drawn], 1))
    return draft, torch.cat([d.token_ids for d in drawn], 1), stats


def plain_pytorch(ids: Tensor, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as it is usually written: float32 probabilities of both, then gather, compare, subtract, draw."""
    p = torch.softmax(target.float() / TEMPERATURE, -1)
    q = torch.softmax(draft.float() / TEMPERATURE, -1)
    p_x = p[:, :DRAFT].gather(-1, ids[..., None]).squeeze(-1)
    q_x = q.gather(-1, ids[..., None]).squeeze(-1)
    accepted = torch.rand_like(p_x) * q_x < p_x
    count = accepted.long().cumprod(-1).sum(-1)
    residual = torch.cat([(p[:, :DRAFT] - q).clamp_(min=0), p[:, DRAFT:]], 1)
    row = residual[torch.arange(BATCH, device=ids.device), count]
    return count, torch.multinomial(row, 1).squeeze(-1)


def median_seconds(calls: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Median time of each call; the calls take turns, so that a busy moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(ROUNDS + 2):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_ >= 2:  # the first two warm up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def show_tokens(ids: Tensor, result: ChainResult) -> None:
    print(f"{'request':>7}  {'kept':>4}  drafted (in brackets: refused)                           next token")
    for b in range(BATCH):
        kept = int(result.num_accepted[b])
        words = [f"{token}" if i < kept else f"[{token}]" for i, token in enumerate(ids[b].tolist())]
        print(f"{b:>7}  {kept:>4}  {' '.join(f'{w:>9}' for w in words)}  {int(result.token_ids[b, kept]):>16}")
    tokens = result.num_accepted.float().mean().item() + 1
    print(f"\n{tokens:.2f} tokens a request from one pass of the target model, which alone would give 1.\n")


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampling = Sampling.full(BATCH, temperature=TEMPERATURE, device=device)
    seed = torch.arange(BATCH, device=device)
    rng = RngKey(seed, position=torch.full_like(seed, 100), step=torch.zeros_like(seed))
    target = model_like_rows(BATCH * (DRAFT + 1), device).view(BATCH, DRAFT + 1, VOCAB)
    draft, ids, stats = drafted(target, sampling, rng)
    distributions = {"sampling": sampling, "draft_sampling": sampling, "rng": rng}
    result = verify_chain(ids, target, draft, draft_stats=stats, **distributions)
    show_tokens(ids, result)

    pytorch = "plain PyTorch"
    calls: dict[str, Callable[[], object]] = {
        pytorch: lambda: plain_pytorch(ids, target, draft),
        "verify_chain": lambda: verify_chain(ids, target, draft, **distributions),
        "verify_chain, statistics from sample": lambda: verify_chain(
            ids, target, draft, draft_stats=stats, **distributions
        ),
    }
    taken = median_seconds(calls, device)
    print(f"batch {BATCH}, {DRAFT} drafts, vocabulary {VOCAB}, float32, {device}, {torch.get_num_threads()} threads")
    for name, seconds in taken.items():
        print(f"  {name:<40} {seconds * 1e3:9.2f} ms {taken[pytorch] / seconds:8.1f} x")
    missing = [f"{name} ({reason})" for name, reason in available_backends(device).items() if reason]
    print("not available here: " + "; ".join(missing) if missing else "every backend is available here")


if __name__ == "__main__":
    main()
