"""Ops beside their PyTorch reference, which must give the same ids: `kernels benchmark FOLDER`."""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark

BATCH, DRAFT, VOCAB = 8, 4, 32000


class OpsBenchmark(Benchmark):
    seed = 7

    def setup(self) -> None:
        kernel, device = self.kernel, self.device
        zeros = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.rng = kernel.RngKey(torch.arange(BATCH, device=device), zeros, zeros)
        self.sampling = kernel.Sampling.full(BATCH, temperature=0.8, top_k=50, top_p=0.95, device=device)
        self.target = 3 * torch.randn(BATCH, DRAFT + 1, VOCAB, device=device)
        self.draft = self.target[:, :DRAFT] + torch.randn(BATCH, DRAFT, VOCAB, device=device)
        self.ids = self.draft.argmax(-1)
        # A binary tree: the root, its two children and theirs; siblings are the likeliest ids of their parent's row.
        self.parents = torch.tensor([[-1, 0, 0, 1, 1]], device=device).expand(BATCH, -1).contiguous()
        best = self.target.topk(2).indices
        self.nodes = torch.cat([zeros[:, None], best[:, 0], best[:, 1]], 1)

    def sample(self, backend: str | None = None) -> torch.Tensor:
        return self.kernel.sample(
            self.target[:, 0], sampling=self.sampling, rng=self.rng, purpose="draft", num_samples=4, backend=backend
        ).token_ids

    def chain(self, backend: str | None = None) -> torch.Tensor:
        return self.kernel.verify_chain(
            self.ids, self.target, self.draft, sampling=self.sampling, draft_sampling=self.sampling, rng=self.rng,
            backend=backend,
        ).token_ids  # fmt: skip

    def tree(self, backend: str | None = None) -> torch.Tensor:
        return self.kernel.verify_tree(
            self.nodes, self.parents, self.target, max_depth=2, sampling=self.sampling, rng=self.rng, rule="match",
            backend=backend,
        ).token_ids  # fmt: skip

    def benchmark_sample(self) -> None:
        self.out = self.sample()

    def verify_sample(self) -> torch.Tensor:
        return self.sample("reference")

    def benchmark_verify_chain(self) -> None:
        self.out = self.chain()

    def verify_verify_chain(self) -> torch.Tensor:
        return self.chain("reference")

    def benchmark_verify_tree(self) -> None:
        self.out = self.tree()

    def verify_verify_tree(self) -> torch.Tensor:
        return self.tree("reference")
