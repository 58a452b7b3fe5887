"""What tests need to know of families beside their presets."""

from __future__ import annotations

from vllm_lazy_grammar.tools.presets import catalogue

MORE_TOKENS = {
    "internlm": ["<|plugin|>", "<|interpreter|>"],
    "harmony": [],
    "llama4_pythonic": ["<|python_start|>", "<|python_end|>", "<|python_tag|>"],
    "kimi_k2": ["<think>", "</think>"],
    "plamo3": ["<|plamo:tag|>"],
    "gemma4": ["<|channel>", "<channel|>", "<|turn>", "<|tool_response>"],
    "minimax_m3": ["]<]minimax[>["],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
}


def extra_tokens(family):
    """The special tokens of a family's own tokenizer."""
    preset = catalogue().families[family]
    return [*preset.markers, *preset.needs, *MORE_TOKENS.get(family, [])]
