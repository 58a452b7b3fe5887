"""A trace as one page that needs nothing else: no network, no other file.

Invariants:
- Whatever an answer holds is data: it is escaped where it stands in the page, and shown as text.
- The page forbids itself every connection.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.story import Line

_TEMPLATE = Path(__file__).with_name("page.html")
_PLACE = "/*STORY*/null"


def page(story: list[Line]) -> str:
    """The page of a story."""
    data = json.dumps(story, ensure_ascii=True).replace("<", "\\u003c").replace("&", "\\u0026")
    return _TEMPLATE.read_text("utf-8").replace(_PLACE, data)
