"""A model of how fast GPU kernels are, made from their machine code; no GPU is needed. `python -m tools.gpu_model`.

sass.py reads a disassembly, count.py counts what its hot path does, machines.py knows the GPUs, model.py predicts the
time of a call. cuda.py and triton_calls.py compile our kernels, rivals.py those of others, known.py two with published
times. limits.py is the table that `--check` enforces, page.py writes docs/gpu-model.md.
"""
