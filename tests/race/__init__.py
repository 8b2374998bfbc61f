"""Data races of the CUDA kernels, looked for on the host: `make race`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cases of other tests
