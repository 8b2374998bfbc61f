"""The GPU kernels executed without a GPU: their PTX runs in GPGPU-Sim, on the CPU tensors of ordinary calls."""
