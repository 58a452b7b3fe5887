"""The logger that an operator sees: vLLM configures the loggers below ``vllm`` and no others.

Invariants:
- Every line that is meant for an operator goes through this logger; its level and format are those of vLLM.
"""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.lazy_grammar")
