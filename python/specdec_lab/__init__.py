"""The laboratory of speculative decoding: tests of losslessness, its theory as functions, planning, training.

- `lossless`: holds samplers, ours and others, against the target's exact distribution.
- `theory`: expected tokens, speed-ups, bounds and optimal drafts as functions.
- `plan`: draft length and tree for a measured run.
- `training`: the models in python/models.
"""
