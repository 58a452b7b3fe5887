"""What all tests share: deterministic property tests, the data beside the checkout, and a guard on the fast suite.

Invariants:
- A property test draws the same examples in every run.
- A run in which no chosen test says that it needs vLLM fails where vLLM was imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

_SHARED = Path(os.environ.get("LAZY_GRAMMAR_SHARED", Path(__file__).resolve().parents[2] / "shared"))
_NEEDS_VLLM = ("vllm", "server")

settings.register_profile("project", derandomize=True, deadline=None, database=None)
settings.load_profile("project")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data folder beside the checkout; the test is skipped where it is absent."""
    if not _SHARED.is_dir():
        pytest.skip(f"{_SHARED} is absent")
    return _SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `shared` where that folder is absent."""
    if _SHARED.is_dir():
        return
    skip = pytest.mark.skip(reason=f"{_SHARED} is absent")
    for item in items:
        if item.get_closest_marker("shared"):
            item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that promised to do without vLLM and did not."""
    promised = not any(item.get_closest_marker(name) for item in session.items for name in _NEEDS_VLLM)
    if promised and "vllm" in sys.modules:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        message = "no chosen test is marked `vllm` or `server`, yet vLLM was imported"
        raise pytest.UsageError(message)
