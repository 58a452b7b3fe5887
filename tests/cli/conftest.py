"""The command, run in this process, and a small tokenizer's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

SPECIAL = ["<s>", "</s>", "<tool_call>", "</tool_call>"]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A model's folder without a model: bytes, a few merges, four special tokens, and a config that says how wide the output is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(["<answer> the answer"] * 3, trainer)
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[1]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320}))
    return folder


@pytest.fixture
def command(monkeypatch):
    """Run it: the result has `exit_code` and `output`, wide enough that no line is broken."""
    from vllm_lazy_grammar.cli.main import app

    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*args):
        found = CliRunner().invoke(app, [str(arg) for arg in args])
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        return found

    return run
