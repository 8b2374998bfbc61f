"""The samplers of other packages by their own signatures, for callers that hold probabilities and coins already.

`sglang` and `flashinfer` keep names, keyword spelling, layouts and what is written in place. A caller who has logits is
better served by `verify_chain` and `verify_tree`: they read a sixth of the bytes or less.
"""
