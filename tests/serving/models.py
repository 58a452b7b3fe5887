"""The models that the server tests serve: the demo model, and one with dummy weights and a large vocabulary.

Invariants:
- A made folder is whole whenever it exists: it appears by one rename.
- Nothing here imports vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("LAZY_GRAMMAR_SHARED", CHECKOUT.parent / "shared"))

QWEN3_VOCABULARY = 151_936
"""Rows of the embedding; the tokenizer knows 151,669 ids, the rest is padding."""

_PADDING = 256
"""Padding ids added where another tokenizer stands in for Qwen3's."""


def demo_model() -> Path:
    """SmolLM2-135M-Instruct, prepared by ``scripts/demo_model`` on the first call; its folder."""
    made = subprocess.run(
        [sys.executable, str(CHECKOUT / "scripts/lib/demo_model.py")], check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(made.stdout.splitlines()[-1])


def dummy_model(target: Path) -> Path:
    """A two-layer Qwen3 for ``--load-format dummy`` at ``target``: Qwen3's tokenizer, or the demo model's without shared/."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(_qwen3_config(_copy_tokenizer(made)), indent=1))
        made.rename(target)
    return target


def _copy_tokenizer(target: Path) -> int:
    """Put a tokenizer into ``target``; the number of ids that its model has."""
    large = SHARED / "data" / "qwen3"
    source = large if large.is_dir() else demo_model()
    for path in [*source.glob("tokenizer*.json"), *source.glob("chat_template.jinja")]:
        shutil.copyfile(path, target / path.name)
    if source == large:
        return QWEN3_VOCABULARY
    vocabulary: int = json.loads((source / "config.json").read_text())["vocab_size"]
    return vocabulary + _PADDING


def _token_ids(target_vocabulary: int) -> tuple[int, int]:
    """Begin and end of text: Qwen3's own ids, else the demo model's."""
    return (151_643, 151_645) if target_vocabulary == QWEN3_VOCABULARY else (1, 2)


def _qwen3_config(vocabulary: int) -> dict[str, object]:
    """The smallest config that vLLM's CPU build serves with head size 32."""
    begin, end = _token_ids(vocabulary)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": begin,
        "eos_token_id": end,
        "use_cache": True,
    }
