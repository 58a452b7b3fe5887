"""vLLM's own parser of a family, as a server uses it: whole, and token by token. What is imported inside functions takes seconds."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import logging
import os
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tools.presets_of import extra_tokens

END = "</s>"
SHARED = Path(os.environ.get("LAZY_GRAMMAR_SHARED", Path(__file__).resolve().parents[3] / "shared"))


@contextmanager
def foreign():
    """What another package warns of and logs, while it is imported and used, is not ours."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@functools.cache
def registered():
    """The parsers that this vLLM has."""
    with foreign():
        from vllm.tool_parsers import ToolParserManager

        return frozenset(ToolParserManager.list_registered())


@functools.cache
def small_tokenizer(family):
    """Bytes and a few merges: what a token splits is nobody's choice."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
        "<tool_call>\n</tool_call>",
        "hello there, let me see",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", END]
    )
    tokenizer.train_from_iterator(corpus * 3, trainer)
    return _with_specials(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END), family)


@functools.cache
def loaded_tokenizer(folder, family):
    from transformers import AutoTokenizer

    return _with_specials(AutoTokenizer.from_pretrained(folder), family)


def qwen3_tokenizer(family):
    return loaded_tokenizer(str(SHARED / "data" / "qwen3"), family)


def _with_specials(tokenizer, family):
    from tokenizers import AddedToken

    known = tokenizer.get_vocab()
    new = [AddedToken(text, special=True, normalized=False) for text in extra_tokens(family) if text not in known]
    tokenizer.add_tokens(new, special_tokens=True)
    return tokenizer


class HarmonyTokenizer:
    """gpt-oss's own tokens, as far as its parser asks for them."""

    def __init__(self):
        from openai_harmony import load_harmony_encoding

        self._encoding = load_harmony_encoding("HarmonyGptOss")

    def encode(self, text, *, add_special_tokens=False):
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, tokens, **_):
        return self._encoding.decode(tokens)

    def get_vocab(self):
        return {}


@functools.cache
def harmony_tokenizer():
    """gpt-oss's own tokens. Its package would download their table; another one carries it."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "o200k_base.tiktoken").write_bytes(_o200k())
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", folder)
        return HarmonyTokenizer()


def _o200k():
    """The table as openai-harmony reads it; found without importing the package that carries it, which warns."""
    (package,) = importlib.util.find_spec("bpe_openai").submodule_search_locations
    return gzip.decompress((Path(package) / "data/o200k_base.tiktoken.gz").read_bytes())


class _Shown:
    """What each further token adds to the text; of gpt-oss's parser only the tokens count."""

    def __init__(self, tokenizer):
        from tokenizers.decoders import DecodeStream

        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=False)

    def step(self, token):
        return "" if self._backend is None else self._stream.step(self._backend, token) or ""


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@functools.cache
@foreign()
def parser_class(name):
    """The composed parser with required and named routed through the family's own parser, as the adapter does."""
    from vllm.parser.parser_manager import ParserManager

    found = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, is_harmony=name == "openai")
    own = type("Own", (found.tool_parser_cls,), {"supports_required_and_named": False})
    return type("OwnParser", (found,), {"tool_parser_cls": own}) if name != "openai" else found


@foreign()
def request_of(tools, choice="auto"):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=choice
    )


@foreign()
def whole(name, tokenizer, tools, text):
    """Content and calls of a complete answer."""
    request = request_of(tools)
    parser = parser_class(name)(tokenizer, request.tools)
    request = parser.adjust_request(request)
    _, content, calls = parser.parse(text, request, True, encode(tokenizer, text))
    return content, [(call.name, read(call.arguments)) for call in calls or ()]


@foreign()
def streamed(name, tokenizer, tools, text):
    """Content and calls put together from the deltas, one token each."""
    request = request_of(tools)
    parser = parser_class(name)(tokenizer, request.tools)
    request = parser.adjust_request(request)
    tokens = encode(tokenizer, text)
    shown = _Shown(tokenizer)
    content, found = "", {}
    for i, token in enumerate(tokens):
        delta = shown.step(token)
        message = parser.parse_delta(delta, [token], request, [] if i == 0 else None, finished=i + 1 == len(tokens))
        if message is None:
            continue
        content += message.content or ""
        for call in message.tool_calls or ():
            names, arguments = found.setdefault(call.index, ([], []))
            names.append(call.function.name or "")
            arguments.append(call.function.arguments or "")
    return content, [("".join(names), read("".join(arguments))) for _, (names, arguments) in sorted(found.items())]


def read(arguments):
    """Arguments as JSON; what is no JSON as it is."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
