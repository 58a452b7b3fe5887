"""That nothing is left to compile in a request's step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REQUESTS = """
import importlib, json, pkgutil
import numpy as np
from vllm_lazy_grammar import core
from vllm_lazy_grammar.core.warm import warm

def versions():
    modules = [importlib.import_module(m.name) for m in pkgutil.iter_modules(core.__path__, "vllm_lazy_grammar.core.")]
    functions = [f for m in modules for f in vars(m).values() if hasattr(f, "nopython_signatures")]
    return {f"{f.__module__}.{f.__name__}": len(f.nopython_signatures) for f in functions}

warm()
before = versions()

from tests.core.kit import Workshop, ids
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.testing import small_vocabulary
shop = Workshop(engine=XgrammarEngine(small_vocabulary(), max_threads=1))
row = np.zeros(shop.vocabulary.row_words, np.int32)
for triggers in ((), ("word:<t>",)):
    session = shop.session(r'(?:<t>)?\\{"[abc]*":[12]+\\}', *triggers, blanks="json", budget=True, mandatory=1, force_after=2) if triggers else (
        shop.session(r'(?:<t>)?\\{"[abc]*":[12]+\\}', blanks="json", budget=True))
    for remaining, token in zip(range(12, 0, -1), ids("<t>", "{", '"', "a", '"', ":", "1"), strict=False):
        for left in (None, 4000, remaining):
            session.fill(row, left)
        session.forced_token()
        session.apply(np.zeros(shop.vocabulary.size, np.float32))
        assert session.accept(token), token
    session.completion(64)
after = versions()
print(json.dumps({name: (before[name], after[name]) for name in after if before[name] != after[name]}))
"""


@pytest.mark.slow
def test_after_warming_no_step_of_a_request_needs_a_version_of_a_compiled_function_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-c", REQUESTS],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert json.loads(done.stdout) == {}
