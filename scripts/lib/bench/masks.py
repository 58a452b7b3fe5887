"""Masks alone, over real schemas with valid and invalid instances, through our Matcher protocol: each engine, and the policy that chooses.

Each engine works in a process of its own with one thread, so that a compile which takes too long can be ended; they take turns schema by schema.
Behind each mask the engine's own call and ours are made once more at the same position: the difference is what our protocol costs. All is processor time, so that a busy
machine is not held against anybody: of the process for a compile, of the thread for a mask; asking this clock takes some 0.3 us of each figure.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.lib.bench.stats import show, verdict
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.errors import LazyGrammarError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from vllm_lazy_grammar.core.matcher import Engine, Matcher, Row
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

COMPILE_SECONDS = 60.0
WALK_SECONDS = 180.0
TOKENS = 6_000
"""Tokens of a schema's instances that are walked, at most."""


def _xgrammar(vocabulary: Vocabulary) -> Engine:
    from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

    return XgrammarEngine(vocabulary, max_threads=1)


def _guidance(vocabulary: Vocabulary) -> Engine:
    from vllm_lazy_grammar.engines.guidance import GuidanceEngine

    return GuidanceEngine(vocabulary)


def _glrmask(vocabulary: Vocabulary) -> Engine:
    from vllm_lazy_grammar.engines.glrmask import GlrmaskEngine

    return GlrmaskEngine(vocabulary)


def _auto(vocabulary: Vocabulary) -> Engine:
    from vllm_lazy_grammar.engines.policy import Choice, PolicyEngine
    from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

    return PolicyEngine(XgrammarEngine(vocabulary, max_threads=1), Choice(), lambda _: None)


ENGINES: dict[str, Callable[[Vocabulary], Engine]] = {
    "xgrammar": _xgrammar,
    "llguidance": _guidance,
    "glrmask": _glrmask,
    "auto": _auto,
}


def _raw(matcher: Matcher, row: Row) -> Callable[[], object]:
    """The engine's own call behind `fill`."""
    at: Any = matcher
    match type(matcher).__name__:
        case "XgrammarMatcher":
            return lambda: at._matcher.fill_next_token_bitmask(row)
        case "GuidanceMatcher":
            at._filled()
            return lambda: at._matcher.unsafe_compute_mask_ptr(at._place, at._buffer.nbytes)
        case _:
            return lambda: at._state.fill_mask(row)


def work(name: str, vocabulary: Vocabulary, pipe: Connection) -> None:
    """A worker: compiles and walks what comes through the pipe, until it is closed."""
    engine = ENGINES[name.partition(" ")[0]](vocabulary)
    row = np.zeros(vocabulary.row_words, np.int32)
    engine.compile(GrammarKey("json", '{"type": "object", "properties": {"a": {"type": "string"}}}')).matcher().fill(
        row
    )
    pipe.send("ready")
    gc.collect()
    gc.freeze()  # the vocabulary is not looked through again before each schema
    while (job := pipe.recv()) is not None:
        gc.collect()
        gc.disable()
        begin = time.process_time()
        try:
            grammar = engine.compile(GrammarKey("json", job["schema"], undeclared=name.endswith("allowed")))
        except LazyGrammarError as error:
            pipe.send(("refused", getattr(error, "reason", str(error))))
            continue
        grammar.matcher().fill(row)
        pipe.send(("compiled", (time.process_time() - begin) * 1e3, getattr(grammar, "origin", name)))
        pipe.send(_walked(grammar.matcher, job["tests"], row))
        gc.enable()


def _walked(start: Callable[[], Matcher], tests: list[tuple[list[int], bool]], row: Row) -> dict[str, Any]:
    """Each test's (is valid, was accepted), and us of each mask, by which a fill is dearer than the engine's own call there, and of each token taken."""
    found: dict[str, Any] = {"tests": [], "mask": [], "over": [], "take": []}
    for tokens, valid in tests:
        matcher = start()
        raw = _raw(matcher, row.copy())
        taken = True
        for token in tokens:
            found["mask"].append(_us(lambda: matcher.fill(row)))  # noqa: B023 -- called at once
            own, again = _us(raw), _us(lambda: matcher.fill(row))  # noqa: B023 -- the same
            found["over"].append(again - own)
            begin = time.thread_time_ns()
            taken = bool(row[token >> 5] >> (token & 31) & 1) and matcher.accept(token)
            found["take"].append((time.thread_time_ns() - begin) / 1e3)
            if not taken:
                break
        found["tests"].append((valid, taken and matcher.is_completed()))
    return found


def _us(call: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e3


class Worker:
    """One engine's process; begun again where it was ended."""

    def __init__(self, name: str, vocabulary: Vocabulary) -> None:
        self.name, self._vocabulary = name, vocabulary
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(self.name, self._vocabulary, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._get(120) == "ready"

    def _get(self, seconds: float) -> Any:
        """What it answers; None where it takes longer, or has died."""
        try:
            return self._pipe.recv() if self._pipe.poll(seconds) else None
        except EOFError:
            return None

    def job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compile and walk one schema."""
        self._pipe.send(job)
        answer = self._get(COMPILE_SECONDS)
        if answer is None:
            return self._again("compile")
        if answer[0] == "refused":
            return {"status": "refused", "reason": answer[1]}
        walked = self._get(WALK_SECONDS)
        return (
            self._again("walk") if walked is None else {"status": "ok", "ms": answer[1], "origin": answer[2], **walked}
        )

    def _again(self, what: str) -> dict[str, Any]:
        died = not self._process.is_alive()
        self._process.kill()
        self._process.join()
        self._begin()
        return {"status": f"{what} {'died' if died else 'took too long'}"}

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(5)
        self._process.kill()


def jobs(folder: Path, tokenizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema by name, and its instances as token ids."""
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        left, tests = TOKENS, []
        for test in data["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            left -= len(ids)
            if left < 0:
                break
            tests.append((ids, test["valid"]))
        yield file.name, {"schema": json.dumps(data["schema"]), "tests": tests}


def run(
    folder: Path, vocabulary: Vocabulary, tokenizer: Path, names: list[str] | None = None, *, every: int = 1
) -> None:
    """Print the tables for all schemas of a folder, or for each `every`-th; where MASKS_OUT names a file, all that was measured goes there as JSON lines."""
    from tokenizers import Tokenizer

    os.environ["RAYON_NUM_THREADS"] = "1"
    names = names or [f"{engine}{mode}" for mode in ("", " allowed") for engine in ENGINES]
    if find_spec("glrmask") is None:
        print("glrmask is not installed: it is left out")
        names = [name for name in names if not name.startswith("glrmask")]
    workers = [Worker(name, vocabulary) for name in names]
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    tests: dict[str, Any] = {}
    given = islice(jobs(folder, Tokenizer.from_file(str(tokenizer))), 0, None, every)
    for turn, (file, job) in enumerate(given):
        tests[file] = job["tests"]
        for worker in workers[turn % len(workers) :] + workers[: turn % len(workers)]:
            found[worker.name][file] = answer = worker.job(job)
            _log({"engine": worker.name, "file": file, **answer})
    for worker in workers:
        worker.close()
    _report(found, tests, vocabulary.size)


def _log(answer: dict[str, Any]) -> None:
    if "MASKS_OUT" in os.environ:
        with Path(os.environ["MASKS_OUT"]).open("a", encoding="utf-8") as log:
            log.write(json.dumps(answer) + "\n")


def _report(found: dict[str, dict[str, Any]], tests: dict[str, Any], size: int) -> None:
    schemas = sum(bool(each) for each in tests.values())
    print(f"\nMasks alone: {len(tests)} schemas ({schemas} with instances), {size} ids, one thread")
    print(
        "| engine | first mask p50 / p90 / p99 ms | mask p50 / p99 / p99.9 us, mean | ours over the engine's own call p50 / p99 us "
        "| token taken p50 / p99 us | not compiled | valid accepted, invalid rejected | all-correct |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, files in found.items():
        show(name, " | ".join(_line(files, tests)))
    for name, files in found.items():
        print(
            f"{name}: {dict(Counter(each['origin'].split(',')[0] if 'origin' in each else each['status'] for each in files.values()))}"
        )


def _line(files: dict[str, Any], tests: dict[str, Any]) -> Iterator[str]:
    done = [each for each in files.values() if each["status"] == "ok"]
    slow = sum("took too long" in each["status"] for each in files.values())
    first = [each["ms"] for each in done] + [COMPILE_SECONDS * 1e3] * slow
    mask, over, take = (np.array([us for each in done for us in each[of]]) for of in ("mask", "over", "take"))
    yield _shown(first, (50, 90, 99)) + f" ({verdict(float(np.percentile(first, 99)), 20)})"
    yield f"{_shown(mask, (50, 99, 99.9))}, {mask.mean():.3g}"
    yield _shown(over, (50, 99))
    yield _shown(take, (50, 99))
    yield str(len(files) - len(done))
    yield _correctness(files, tests)


def _correctness(files: dict[str, Any], tests: dict[str, Any]) -> str:
    counts: Counter[tuple[bool, bool]] = Counter()
    correct = 0
    for file, expected in tests.items():
        answers = files[file].get("tests")
        # What is not compiled accepts nothing and rejects nothing.
        rights = [answers is not None and answers[i][1] == valid for i, (_, valid) in enumerate(expected)]
        counts.update((valid, right) for (_, valid), right in zip(expected, rights, strict=True))
        correct += bool(expected) and all(rights)
    shares = [counts[valid, True] / (counts[valid, True] + counts[valid, False]) for valid in (True, False)]
    whole = sum(bool(each) for each in tests.values())
    return f"{shares[0]:.1%}, {shares[1]:.1%} | {correct / whole:.1%} ({correct} of {whole})"


def _shown(values: Any, percentiles: tuple[float, ...]) -> str:
    return " / ".join(f"{np.percentile(values, each):.3g}" for each in percentiles)


if __name__ == "__main__":
    from tests.oracles import vocabularies

    data = vocabularies.SHARED / "data"
    step = int(os.environ.get("MASKS_EVERY", "1"))
    run(data / "maskbench", vocabularies.qwen3(), data / "qwen3" / "tokenizer.json", sys.argv[1:] or None, every=step)
