"""What is read of a vLLM request besides grammar and triggers: markers, and the end of the prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.quiet import import_quietly, import_vllm
from vllm_lazy_grammar import RequestError
from vllm_lazy_grammar.core.vocabulary import Vocabulary

pytestmark = pytest.mark.vllm

START, END = 4, 5
VOCABULARY = Vocabulary(
    [b"a", b"b", b"c", b" "], 8, special_ids=(START, END), added={"<|start|>": START, "<|end|>": END}, eos_ids=(END,)
)


@pytest.fixture
def module():
    import_vllm()
    return import_quietly("vllm_lazy_grammar.adapter.request")


def read(module, prompt, max_model_len=100, **extra):
    params = SimpleNamespace(
        extra_args={"grammar_triggers": ["word:<t>"], **extra}, all_stop_token_ids={END}, min_tokens=3
    )
    option = SimpleNamespace(name="REGEX")
    structured = SimpleNamespace(structured_output_key=(option, "a+"))
    request = SimpleNamespace(
        request_id="r",
        sampling_params=params,
        structured_output_request=structured,
        prompt_token_ids=prompt,
        output_token_ids=[],
        num_prompt_tokens=len(prompt or ()),
        max_tokens=50,
    )
    return module.read(request, VOCABULARY, compact=False, max_model_len=max_model_len)


def test_the_context_begins_with_the_last_marker_of_the_prompt(module):
    prompt = [START, 0, END, START, 1, 2]
    assert read(module, prompt, grammar_context="<|start|>").context == b"<|start|>bc"
    assert read(module, prompt, grammar_context="<|end|>").context == b"<|end|><|start|>bc"


@pytest.mark.parametrize("prompt", [[0, 1], [], None])
def test_a_prompt_without_the_marker_gives_no_context(module, prompt):
    assert read(module, prompt, grammar_context="<|start|>").context == b""


def test_without_a_marker_the_prompt_is_nobodys_business(module):
    assert read(module, [START, 0]).context == b""


def test_markers_are_read_and_none_is_the_default(module):
    assert read(module, [0], grammar_markers=["<|end|>"]).markers == ("<|end|>",)
    assert read(module, [0]).markers == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("grammar_markers", "x"), ("grammar_markers", [1]), ("grammar_context", 3), ("grammar_counted_as", "lazy")],
)
def test_a_wrong_kind_of_value_names_the_field(module, key, value):
    with pytest.raises(RequestError, match=rf"vllm_xargs\.{key}"):
        read(module, [0], **{key: value})


@pytest.mark.parametrize(("max_model_len", "budget"), [(100, 50), (40, 38)])
def test_the_budget_is_max_tokens_or_what_the_context_leaves(module, max_model_len, budget):
    found = read(module, [0, 1], max_model_len)
    assert (found.budget, found.min_tokens) == (budget, 3)
