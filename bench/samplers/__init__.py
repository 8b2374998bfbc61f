"""Samplers that the losslessness laboratory looks into and the benchmarks do not time.

Each file follows the protocol of `specdec_lab.lossless.samplers`; so do the rivals of the benchmarks.
"""
