"""scripts/bench: all benchmarks, or those named: steps gate trie first_token windows drafts."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.serving.models import SHARED, demo_model, dummy_model


def main() -> None:
    """Run what the command line names, everything where it names nothing."""
    wanted = set(sys.argv[1:]) or {"steps", "gate", "trie", "first_token", "windows", "drafts"}
    model = demo_model()
    qwen = SHARED / "data" / "qwen3"
    if "steps" in wanted:
        from scripts.lib.bench import steps

        steps.run("the demo model's 49,152 ids", model)
        if qwen.is_dir():
            steps.run("Qwen3's 151,936 ids", dummy_model(Path(tempfile.mkdtemp()) / "qwen3"))
    if "windows" in wanted:
        from scripts.lib.bench import windows

        windows.run("the demo model's 49,152 ids", model)
        if qwen.is_dir():
            windows.run("Qwen3's 151,936 ids", dummy_model(Path(tempfile.mkdtemp()) / "qwen3"))
    if wanted & {"gate", "trie"}:
        from transformers import AutoTokenizer

        from scripts.lib.bench import gate, trie
        from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

        tokenizer = AutoTokenizer.from_pretrained(qwen if qwen.is_dir() else model)
        engine = XgrammarEngine.for_tokenizer(tokenizer, 151_936 if qwen.is_dir() else len(tokenizer))
        if "gate" in wanted:
            gate.run(engine, tokenizer)
        if "trie" in wanted:
            trie.run(engine)
    if "first_token" in wanted:
        from scripts.lib.bench import first_token

        first_token.run()
    if "drafts" in wanted:
        from scripts.lib.bench import drafts

        drafts.run()


if __name__ == "__main__":
    main()
