"""What the tests of drafts share: sessions over the small vocabulary and the fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.kit import Workshop


@pytest.fixture
def shop() -> Workshop:
    """Compiles at once."""
    return Workshop()


@pytest.fixture
def held() -> Iterator[Workshop]:
    """Compiles when its engine is let go."""
    made = Workshop(threads=1, held=True)
    yield made
    made.close()
