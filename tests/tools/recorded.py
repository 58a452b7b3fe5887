"""The recorded outputs of the package `canitoolcall`, each with the family that writes so."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path

from vllm_lazy_grammar.tools.presets import catalogue

THINK_END = re.compile(r"</think>|\[/THINK\]|<channel\|>")

BY_MODEL = (
    ("DeepSeek-V3-", "deepseek_v3"),
    ("DeepSeek-V3.1", "deepseek_v31"),
    ("DeepSeek-V3.2", "deepseek_v32"),
    ("DeepSeek-V4.1", "deepseek_v41"),
    ("DeepSeek-V4", "deepseek_v4"),
    ("GLM-4.5", "glm45"),
    ("GLM", "glm47"),
    ("Kimi-K3", "kimi_k3"),
    ("Kimi", "kimi_k2"),
    ("gemma-4", "gemma4"),
    ("gpt-oss", "harmony"),
    ("Llama-4", "llama4_pythonic"),
    ("lama", "llama3_json"),
    ("Qwen3-Coder", "qwen3_coder"),
    ("Qwen3.", "qwen3_coder"),
    ("Qwen", "hermes"),
    ("Mistral-7B", "mistral_v3"),
)


def folder():
    """Where the fixtures lie; None where the package is not installed."""
    spec = importlib.util.find_spec("canitoolcall")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "_data" / "fixtures"


@functools.cache
def fixtures():
    found = []
    for path in sorted(folder().glob("*/*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            found += [json.loads(line) for line in lines]
    return found


def family_of(fixture):
    """The preset of a recorded output, by the model that wrote it; Mistral's by what is written."""
    if fixture["family"] == "mistral":
        return "mistral_v3" if re.search(r"\[TOOL_CALLS\]\s*\[", fixture["raw_output"]) else "mistral"
    return next(family for part, family in BY_MODEL if part in fixture["models"][0])


OPENINGS = {"harmony": r"to=functions\.", "llama3_json": r"<\|python_tag\|>|\{", "llama4_pythonic": r"\["}


def opening_of(family, text):
    """Where the first call of a text begins."""
    openers = catalogue().families[family].trigger.openers
    pattern = OPENINGS.get(family) or "|".join(map(re.escape, openers))
    found = re.search(pattern, text)
    return None if found is None else len(text[: found.start()].encode())


def answer_of(fixture):
    """The output behind its reasoning, which the gate does not see."""
    text = fixture["raw_output"]
    if text.startswith("[THINK]"):
        return text.partition("[/THINK]")[2]
    end = THINK_END.search(text)
    opening = opening_of(family_of(fixture), text)
    return text[end.end() :] if end and (opening is None or len(text[: end.start()].encode()) <= opening) else text


def calls_of(fixture):
    return [(call["name"], call["arguments"]) for call in (fixture.get("expected") or {}).get("tool_calls", ())]
