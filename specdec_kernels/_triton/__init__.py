"""Shared Triton device code, one idea a file, and the launch helpers of every Triton backend."""
