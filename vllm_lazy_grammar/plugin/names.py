"""Modules of vLLM that more than one part of the table names."""

from __future__ import annotations

PARAMS = "vllm.sampling_params"
INPUT = "vllm.v1.engine.input_processor"
ASYNC = "vllm.v1.engine.async_llm"
CHAT = "vllm.entrypoints.openai.chat_completion"
RESPONSES = "vllm.entrypoints.openai.responses"
