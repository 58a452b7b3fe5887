"""A logits processor that makes a model wish for given tokens, so that what a mask forbids is seen on a running server.

A request sends ``vllm_xargs: {"wishes": [ids]}``: at output position ``i`` the model wants ``ids[i]`` above all else, -1 leaves it its own wish.
A wish is no force: a token that the mask forbids stays forbidden, and the model then takes what it likes best of the rest.

Invariants:
- A request without wishes, and a position behind the last one, is left alone.
- What was masked stays masked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.serving.models import demo_model

PROCESSOR = "tests.serving.wishes:Wishes"
_STRONG = 1e4


def __getattr__(name: str) -> Any:
    """``Wishes``, made when vLLM asks for it: this module is also imported where vLLM must not be."""
    if name != "Wishes":
        raise AttributeError(name)
    return _make()


@cache
def _make() -> type:
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class Wishes(LogitsProcessor):
        def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
            self._wanted: dict[int, tuple[list[int], list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self._wanted, batch_update, _wanted)

        def apply(self, logits: Any) -> Any:
            for row, (wishes, output) in self._wanted.items():
                at = len(output)
                if at < len(wishes) and wishes[at] >= 0:
                    logits[row, wishes[at]] += _STRONG
            return logits

    return Wishes


def _wanted(params: Any, prompt: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
    wishes = (params.extra_args or {}).get("wishes")
    return ([int(token) for token in wishes], output) if wishes else None


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(demo_model() / "tokenizer.json"))


def tokens(text: str) -> list[int]:
    """The ids of a text in the demo model's vocabulary."""
    ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def spell(text: str) -> list[int]:
    """The same, one token per character, for texts of ASCII: nothing is merged over what a test looks at."""
    return [token for char in text for token in tokens(char)]


def spelled_out(ids: list[int]) -> str:
    """The text of ids of the demo model's vocabulary, special tokens too."""
    text: str = _tokenizer().decode(ids, skip_special_tokens=False)
    return text
