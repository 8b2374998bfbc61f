"""First use of an installed wheel: every op runs on the native backend and agrees with the reference.

Needs torch and the wheel, nothing else, and refuses to run on a source tree: `python tools/smoke.py`, in any folder
but the repository's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import specdec_kernels
import specdec_loop
from specdec_kernels import RngKey, Sampling, available_backends, use_backend

BATCH, DRAFT, VOCAB = 4, 3, 1000


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    target = torch.randn(BATCH, DRAFT + 1, VOCAB) * 3
    draft = target[:, :DRAFT] + torch.randn(BATCH, DRAFT, VOCAB)
    ids = torch.softmax(draft.flatten(0, 1), -1).multinomial(1).view(BATCH, DRAFT)
    return {"ids": ids, "target": target, "draft": draft}


def run_every_op(backend: str) -> dict[str, tuple[torch.Tensor, ...]]:
    given = inputs()
    ids, target, draft = given["ids"], given["target"], given["draft"]
    rng = RngKey(torch.arange(BATCH), torch.full((BATCH,), 7), torch.zeros(BATCH, dtype=torch.int64))
    distribution = Sampling.full(BATCH, temperature=0.8, top_k=50, top_p=0.95)
    distributions = {"sampling": distribution, "draft_sampling": distribution}
    with use_backend(backend):
        results = {
            "sample": specdec_kernels.sample(target[:, 0], sampling=distribution, rng=rng, purpose="draft"),
            "acceptance_ratios": specdec_kernels.acceptance_ratios(ids, target, draft, **distributions),
            "residual_probs": specdec_kernels.residual_probs(target[:, 0], draft[:, 0], **distributions),
            "residual_sample": specdec_kernels.residual_sample(target[:, 0], draft[:, 0], rng=rng, **distributions),
        }
        for rule in ("ratio", "match", "block", "greedy", "typical", "topm", "distance"):
            results[f"verify_chain {rule}"] = specdec_kernels.verify_chain(
                ids, target, draft, rng=rng, rule=rule, logprobs="processed", **distributions
            )
    return results


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    for package in (specdec_kernels, specdec_loop):
        if Path(package.__file__).resolve().parent.parent in (root, root / "python"):
            sys.exit(f"{package.__name__} comes from the source tree, not from an installed wheel")
    for name, reason in available_backends("cpu").items():
        print(f"{name:10} {reason or 'available'}")
    expected, got = run_every_op("reference"), run_every_op("cpu")
    for name, wanted in expected.items():
        for want, have in zip(wanted, got[name], strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        print(f"{name:22} agrees with the reference")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}: {len(expected)} passed, 0 failed")


if __name__ == "__main__":
    main()
