"""Triggers beside a reasoning parser: what stands in the reasoning is never seen by the gate, save the token that ends it.

Invariants:
- Only a trigger that holds the reasoning's end marker can be refused here; whatever may stand in the answer is left alone.
- Where the grammar holds in the reasoning too (`enable_in_reasoning`), everything is seen and nothing is refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm.reasoning import ReasoningParserManager

from vllm_lazy_grammar.errors import RequestError

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.triggers import Triggers
    from vllm_lazy_grammar.core.vocabulary import Vocabulary


@lru_cache(4)
def _end_marker(parser: str, tokenizer: Any) -> str:
    """The text that ends the reasoning; empty where the parser names none."""
    return ReasoningParserManager.get_reasoning_parser(parser)(tokenizer).reasoning_end_str or ""


def end_marker(config: Any, tokenizer: Any) -> str:
    """The text behind which a server's grammars begin; empty where they begin at once, or no text is known."""
    parser = getattr(config, "reasoning_parser", "")
    return _end_marker(parser, tokenizer) if parser and not config.enable_in_reasoning else ""


def refuse_unseen(triggers: Triggers, marker: str, vocabulary: Vocabulary) -> None:
    """RequestError where a word can never be seen: it holds the end marker, and text before the token that ends it."""
    if not marker:
        return
    text, whole = marker.encode(), vocabulary.token_of(marker) is not None
    for index, data, token in triggers.forcible:
        begin = data.find(text)
        if token is None and (begin > 0 or (begin == 0 and not whole)):
            seen = (
                f"only {marker!r} and what follows" if whole else f"only the last token of {marker!r} and what follows"
            )
            reason = f"this could never be seen: it begins inside the reasoning, of which a trigger sees {seen}"
            raise RequestError(f"vllm_xargs.grammar_triggers[{index}]", str(triggers.spec.triggers[index]), reason)
