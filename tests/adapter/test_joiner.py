"""Text becomes tokens as the tokenizer would write it behind what is there, and what is there stays."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import vocabularies
from vllm_lazy_grammar.adapter.joiner import TokenizerJoiner

pytestmark = pytest.mark.shared

TEXT = json.dumps(
    {"city": "Aix-en-Provence", "days": [1, 22], "who": {"name": "José", "hm": "東京 🙂"}}, ensure_ascii=False, indent=1
)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(vocabularies.SHARED / "data/qwen3/tokenizer.json"))


@pytest.fixture(scope="module")
def joiner(tokenizer):
    return TokenizerJoiner(SimpleNamespace(backend_tokenizer=tokenizer), vocabularies.qwen3())


def test_behind_whole_tokens_the_text_is_the_tokenizers_own(tokenizer, joiner):
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).ids
    pieces = [vocabularies.qwen3().piece(token) for token in tokens]
    for at in range(1, len(tokens)):
        before, behind = b"".join(pieces[:at]), b"".join(pieces[at:])
        if before.decode(errors="replace")[-1] != "\N{REPLACEMENT CHARACTER}":
            assert list(joiner.join(before, behind)) == tokens[at:]


def test_no_fresh_word_begins_in_the_middle_of_one(joiner):
    vocabulary = vocabularies.qwen3()
    assert [vocabulary.piece(t) for t in joiner.join(b'{"ci', b'ty": ')] == [b"ty", b'":', b" "]
    assert [vocabulary.piece(t) for t in joiner.join(b"{", b'"city"')] == [b'"', b"city", b'"']


def test_half_characters_at_the_ends_are_left_out(joiner):
    vocabulary = vocabularies.qwen3()
    pieces = [vocabulary.piece(t) for t in joiner.join(b"\xa9 a", b"b\xc3")]
    assert b"".join(pieces) == b"b"


def test_the_tokens_spell_the_text_and_nothing_else(joiner):
    @given(st.text(max_size=12), st.text(min_size=1, max_size=12))
    def check(before, text):
        pieces = [vocabularies.qwen3().piece(t) for t in joiner.join(before.encode(), text.encode())]
        assert b"".join(pieces) == text.encode()

    check()
