"""Reference decoding loop on top of specdec_kernels; it holds nothing yet."""

__all__: list[str] = []
