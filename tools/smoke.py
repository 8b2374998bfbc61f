"""First use of an installed wheel: `python tools/smoke.py cpu|cuda`, in any folder but the repository's.

Every op runs on the CPU library and agrees with the reference. With `cuda`, the wheel must hold the CUDA library too,
and a torch that has CUDA must load it, which needs no GPU. Needs torch and the wheel, nothing else, and refuses to run
on a source tree.
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


def check_libraries(wanted: str) -> None:
    """The wheel holds the libraries that it should, and torch loads them; a torch without CUDA cannot load `_cuda`."""
    found = {path.name.split(".")[0]: path for path in Path(specdec_kernels.__file__).parent.glob("_c*.so")}
    if set(found) != ({"_cpu", "_cuda"} if wanted == "cuda" else {"_cpu"}):
        sys.exit(f"smoke.py {wanted}: the wheel holds {sorted(found)}")
    for name, path in sorted(found.items()):
        if name == "_cpu" or torch.version.cuda is not None:
            torch.ops.load_library(str(path))
            print(f"{name:22} is loaded")
        else:
            print(f"{name:22} is there; torch {torch.__version__} has no CUDA to load it with")


def main() -> None:
    if sys.argv[1:] not in (["cpu"], ["cuda"]):
        sys.exit("usage: python tools/smoke.py cpu|cuda")
    root = Path(__file__).resolve().parent.parent
    for package in (specdec_kernels, specdec_loop):
        if Path(package.__file__).resolve().parent.parent in (root, root / "python"):
            sys.exit(f"{package.__name__} comes from the source tree, not from an installed wheel")
    check_libraries(sys.argv[1])
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
