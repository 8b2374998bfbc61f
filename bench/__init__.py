"""Benchmarks: `python -m bench` times the ops beside their rivals, `python -m bench.traffic` counts their bytes."""
