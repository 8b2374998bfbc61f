"""The losslessness laboratory: does speculation change what a model says?

Methods (`procedures`) decode texts on tables and on the rows of real models (`exact`, `models`); what comes out is
held against the target's exact distribution (`experiments`, `goodness`). The laboratory has to find samplers that are
broken on purpose (`faults`), and looks into those of others (`samplers`). `tradeoff` and `rejections` measure what Yin
et al. derived.
"""
