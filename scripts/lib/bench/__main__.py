"""scripts/bench: all benchmarks, or those named: steps windows gate trie masks endings dispatch first_token drafts traces metrics."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.serving.models import SHARED, demo_model, dummy_model

QWEN = SHARED / "data" / "qwen3"


def _steps() -> None:
    from scripts.lib.bench import steps

    _on_both(steps)


def _windows() -> None:
    from scripts.lib.bench import windows

    _on_both(windows)


def _on_both(bench: Any) -> None:
    """With the demo model's vocabulary, and with Qwen3's where it is there."""
    bench.run("the demo model's 49,152 ids", demo_model())
    if QWEN.is_dir():
        bench.run("Qwen3's 151,936 ids", dummy_model(Path(tempfile.mkdtemp()) / "qwen3"))


def _tokenizer_and_engine() -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

    tokenizer = AutoTokenizer.from_pretrained(QWEN if QWEN.is_dir() else demo_model())
    size = 151_936 if QWEN.is_dir() else len(tokenizer)
    return tokenizer, XgrammarEngine.for_tokenizer(tokenizer, size)


def _gate() -> None:
    from scripts.lib.bench import gate

    tokenizer, engine = _tokenizer_and_engine()
    gate.run(engine, tokenizer)


def _trie() -> None:
    from scripts.lib.bench import trie

    trie.run(_tokenizer_and_engine()[1])


def _masks() -> None:
    from scripts.lib.bench import masks
    from tests.oracles import vocabularies

    if QWEN.is_dir():
        masks.run(SHARED / "data" / "maskbench", vocabularies.qwen3(), QWEN / "tokenizer.json")


def _endings() -> None:
    from scripts.lib.bench import endings
    from tests.oracles import vocabularies

    if QWEN.is_dir():
        endings.run(SHARED / "data" / "maskbench", vocabularies.qwen3())


def _dispatch() -> None:
    from scripts.lib.bench import dispatch

    _, engine = _tokenizer_and_engine()
    dispatch.run(engine.vocabulary, SHARED / "data" / "tools.json")


def _first_token() -> None:
    from scripts.lib.bench import first_token

    first_token.run()


def _drafts() -> None:
    from scripts.lib.bench import drafts

    drafts.run()


def _traces() -> None:
    from scripts.lib.bench import traces

    traces.run(demo_model())


def _metrics() -> None:
    from scripts.lib.bench import metrics

    metrics.run(demo_model())


BENCHES = {
    "steps": _steps,
    "windows": _windows,
    "gate": _gate,
    "trie": _trie,
    "masks": _masks,
    "endings": _endings,
    "dispatch": _dispatch,
    "first_token": _first_token,
    "drafts": _drafts,
    "traces": _traces,
    "metrics": _metrics,
}


def main() -> None:
    """Run what the command line names, everything where it names nothing."""
    wanted = sys.argv[1:] or list(BENCHES)
    unknown = set(wanted) - set(BENCHES)
    if unknown:
        raise SystemExit(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    for name, bench in BENCHES.items():
        if name in wanted:
            bench()


if __name__ == "__main__":
    main()
