"""A model whose vocabulary is larger than its tokenizer's (cases V1, V2): dummy weights, so an answer is noise wherever it is free."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from tests.serving.asking import chat_args
from tests.serving.servers import DUMMY_LAZY, lazy

pytestmark = pytest.mark.server(DUMMY_LAZY)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DUMMY_LAZY.model_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def padding():
    """The model's last ids, which the tokenizer does not know."""
    size = json.loads((DUMMY_LAZY.model_path() / "config.json").read_text())["vocab_size"]
    return [size - 1, size - 2, size - 100]


def ids_of(server, body, wishes, **options):
    create = server.client.chat.completions.create
    answer = create(**chat_args("Hi.", {**body, "return_token_ids": True}, wishes, {"max_tokens": 12, **options}))
    return answer.choices[0].token_ids


def test_v1_padding_ids_are_never_allowed_where_a_grammar_masks(server, padding):
    assert ids_of(server, {}, padding)[:3] == padding
    masked = ids_of(server, lazy({"regex": "[0-9]{8}"}), padding * 3)
    assert masked
    assert set(masked) & set(padding) == set()


def test_v2_special_tokens_are_masked_in_an_open_json_string(server, tokenizer):
    added = [token for token, text in tokenizer.get_added_tokens_decoder().items() if text.content.startswith("<")]
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 100}}, "required": ["a"]}
    opening = [id_ for char in '{"a": "' for id_ in tokenizer.encode(char, add_special_tokens=False).ids]
    ids = ids_of(server, lazy({"json": schema}), [*opening, *added], max_tokens=len(opening) + len(added) + 200)
    assert ids[: len(opening)] == opening
    assert len(added) >= 10
    assert set(ids[: len(opening) + len(added)]) & set(added) == set()
