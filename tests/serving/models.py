"""The models that the server tests serve: the demo model, one with dummy weights and a large vocabulary, and two for special tokenizers.

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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
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


_THINKING = {"<issue_start>": "<think>", "<issue_closed>": "</think>", "<jupyter_start>": "<tool_call>"}
"""Special tokens of the demo model that nothing writes, renamed to those that reasoning parsers look for."""


def thinking_model(target: Path) -> Path:
    """The demo model at ``target``, with added tokens `<think>`, `</think>` and `<tool_call>` that are shown, as Qwen3's are."""
    if target.is_dir():
        return target
    source = demo_model()
    with _made_at(target) as made:
        for path in source.iterdir():
            (made / path.name).symlink_to(path)
        (made / "tokenizer.json").unlink()
        tokenizer = json.loads((source / "tokenizer.json").read_text())
        for token in tokenizer["added_tokens"]:
            if token["content"] in _THINKING:
                token |= {"content": _THINKING[token["content"]], "special": False}
        tokenizer["model"]["vocab"] = {
            _THINKING.get(text, text): token for text, token in tokenizer["model"]["vocab"].items()
        }
        (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


def mistral_model(target: Path) -> Path:
    """A two-layer Mistral for ``--load-format dummy`` at ``target``, with a tekken tokenizer of ``mistral_common``'s."""
    if target.is_dir():
        return target
    data = Path(str(files("mistral_common"))) / "data"
    with _made_at(target) as made:
        shutil.copyfile(data / "tekken_240911.json", made / "tekken.json")
        (made / "params.json").write_text(json.dumps(_mistral_params(), indent=1))
    return target


@contextmanager
def _made_at(target: Path) -> Iterator[Path]:
    """A folder to be filled, which then appears at ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        yield made
        try:
            made.rename(target)
        except OSError:  # another process was quicker, which is as good; else it is an error
            if not target.is_dir():
                raise


def dummy_model(target: Path) -> Path:
    """A two-layer Qwen3 for ``--load-format dummy`` at ``target``: Qwen3's tokenizer, or the demo model's without shared/."""
    if target.is_dir():
        return target
    with _made_at(target) as made:
        (made / "config.json").write_text(json.dumps(_qwen3_config(_copy_tokenizer(made)), indent=1))
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


def _mistral_params() -> dict[str, object]:
    """The smallest ``params.json`` that vLLM's CPU build serves."""
    return {
        "dim": 64,
        "n_layers": 2,
        "head_dim": 32,
        "hidden_dim": 128,
        "n_heads": 2,
        "n_kv_heads": 1,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-05,
        "vocab_size": 131_072,
        "max_position_embeddings": 8_192,
        "model_type": "transformer",
        "tied_embeddings": True,
        "dtype": "bfloat16",
    }
