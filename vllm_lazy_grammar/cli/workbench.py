"""What the command line needs to drive a session: a vocabulary, the engine, and sessions put together as the server does it.

Invariants:
- The session and the engine are the server's own; nothing of what they do is done here a second time.
- Nothing is downloaded: a tokenizer is a folder on this machine.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.core.assembly import Assembly
from vllm_lazy_grammar.core.blanks import BlankBound
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.compiles import GrammarStore
from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.core.rows import RowCache
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines import xgrammar_vocabulary
from vllm_lazy_grammar.engines.policy import Choice, PolicyEngine
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.triggers import TriggerSpec
    from vllm_lazy_grammar.settings import Settings

_MB = 1 << 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """What a session is asked for; see `core.assembly.Asked`."""

    key: GrammarKey
    spec: TriggerSpec | None
    stop_ids: frozenset[int]
    markers: tuple[str, ...] = ()
    context: bytes = b""


class Workbench:
    """The parts that sessions share, for one vocabulary.

    Args:
        vocabulary: of the model, or of the bytes alone.
        settings: the operator's.
        late: have one thread compile, which a caller may hold; else a grammar is compiled at once.
    """

    def __init__(self, vocabulary: Vocabulary, settings: Settings, *, late: bool = False) -> None:
        self.vocabulary = vocabulary
        self.worker = Worker(1 if late else 0)
        rows = RowCache(settings.row_cache_mb * _MB)
        choice = Choice(settings.engine, settings.relax)
        engine = PolicyEngine(XgrammarEngine(vocabulary), choice, _logger.warning)
        self.store = GrammarStore(
            engine, self.worker, rows, vocabulary.row_words, limit_bytes=settings.grammar_cache_mb * _MB, top_k=0
        )
        bound = BlankBound(vocabulary, settings.whitespace_bound)
        self.assembly = Assembly(
            vocabulary, ByteTrie(vocabulary), rows, bound, timeout_ms=settings.trigger_timeout_ms
        )  # fmt: skip

    def is_token(self, text: str) -> bool:
        """Whether a text is exactly one token."""
        return self.vocabulary.token_of(text) is not None


class Model:
    """A tokenizer's folder, or a model's.

    Args:
        folder: holds what `transformers` makes a tokenizer of.
        size: entries of the model's output; None: as its ``config.json`` says, or as many as the tokenizer has.

    Raises:
        SettingsError: there is no tokenizer in it.
    """

    def __init__(self, folder: Path, size: int | None = None) -> None:
        self._folder = folder
        self.tokenizer = _tokenizer(folder)
        self.vocabulary = xgrammar_vocabulary.vocabulary(self.tokenizer, size or self._size())

    def _size(self) -> int:
        config = _json(self._folder / "config.json")
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
        return size if isinstance(size, int) else len(self.tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a turn of this model."""
        eos = _json(self._folder / "generation_config.json").get("eos_token_id", [])
        own = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        return self.vocabulary.eos_ids.union([eos] if isinstance(eos, int) else eos, own)

    def tokens(self, text: str) -> list[int]:
        """A text as this tokenizer writes it."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found


def _tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise SettingsError("TOKENIZER", str(folder), "there is no such folder")
    from transformers import AutoTokenizer  # noqa: PLC0415 -- takes seconds, and `trace` and `presets` do without

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = f"no tokenizer can be made of it: {str(error).splitlines()[0]}"
        raise SettingsError("TOKENIZER", str(folder), reason) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise SettingsError("TOKENIZER", str(path), f"this is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def byte_vocabulary(markers: Iterable[str]) -> Vocabulary:
    """Each byte a token, the markers as special tokens, and one that is never text: any text can be written, each byte for itself."""
    added = {text: 256 + place for place, text in enumerate(dict.fromkeys(markers))}
    pieces = [bytes((byte,)) for byte in range(256)] + [text.encode() for text in added]
    return Vocabulary(pieces, len(pieces) + 1, special_ids=added.values(), added=added)
