"""Real vocabularies as tests see them, read from the tokenizers' files without a tokenizer library."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import os
from pathlib import Path

from vllm_lazy_grammar.core.vocabulary import Vocabulary

SHARED = Path(os.environ.get("LAZY_GRAMMAR_SHARED", Path(__file__).parents[3] / "shared"))
QWEN3_MODEL_SIZE = 151_936


def _byte_level():
    """The character that stands for each byte in a byte-level vocabulary -> the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


@functools.cache
def qwen3():
    """Qwen3's vocabulary, padded as in its models."""
    data = json.loads((SHARED / "data/qwen3/tokenizer.json").read_text(encoding="utf-8"))
    to_byte = _byte_level()
    pieces = [b""] * QWEN3_MODEL_SIZE
    for text, token in data["model"]["vocab"].items():
        pieces[token] = bytes(to_byte[character] for character in text)
    for entry in data["added_tokens"]:
        pieces[entry["id"]] = entry["content"].encode()
    special = [entry["id"] for entry in data["added_tokens"] if entry["special"]]
    added = {entry["content"]: entry["id"] for entry in data["added_tokens"]}
    return Vocabulary(pieces, QWEN3_MODEL_SIZE, special_ids=special, added=added, eos_ids=[added["<|im_end|>"]])


@functools.cache
def tekken(size=None):
    """The first `size` ids (by default all) of Mistral's tekken vocabulary, from the file that mistral_common ships."""
    package = Path(importlib.util.find_spec("mistral_common").submodule_search_locations[0])
    data = json.loads((package / "data/tekken_240911.json").read_text(encoding="utf-8"))
    size, specials = size or data["config"]["default_vocab_size"], data["config"]["default_num_special_tokens"]
    pieces = [b""] * specials
    pieces += [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][: size - specials]]
    return Vocabulary(pieces, size, special_ids=range(specials))
