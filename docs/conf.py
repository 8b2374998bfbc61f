"""Sphinx configuration of the documentation site: `make docs` writes it to build/docs, offline, warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import specdec_kernels  # noqa: E402

project = "specdec_kernels"
author = "The specdec_kernels authors"
copyright = "The specdec_kernels authors, Apache-2.0"
release = version = specdec_kernels.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["figures"]
html_theme = "furo"
html_title = f"specdec_kernels {release}"
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # links such as design.md#trees
nb_execution_mode = "force"  # the notebook is stored without results
nb_execution_timeout = 300
nb_execution_raise_on_error = True

# Members keep the order of the source, and long signatures get one line an argument.
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give the types with their shapes
autodoc_default_options = {"members": True, "undoc-members": False}
maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
