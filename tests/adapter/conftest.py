"""What one module's tests changed of vLLM is as it was for the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _unregistered() -> Iterator[None]:
    """Take the plugin out of vLLM again where a test put it in."""
    yield
    plugin = sys.modules.get("vllm_lazy_grammar.plugin")
    if plugin is not None and "vllm" in sys.modules:
        plugin.unregister()
