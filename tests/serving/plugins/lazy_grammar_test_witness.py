"""A vLLM plugin for the tests: writes down which of the project's replacements are called, by which process.

Each is wrapped after it was bound. ``LAZY_GRAMMAR_WITNESS`` names the folder; a called seam leaves an empty file named like its target,
and ``all.txt`` lists the whole table.

Invariants:
- A wrapped replacement does what it did.
- What is written is the target's own name, so a seam that nobody calls leaves nothing.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

FOLDER = "LAZY_GRAMMAR_WITNESS"
ALL = "all.txt"


def install() -> None:
    """Bind the project's seams, then wrap what can be called; any number of times is once."""
    if FOLDER not in os.environ or install.done:
        return
    install.done = True
    Path(os.environ[FOLDER]).mkdir(parents=True, exist_ok=True)
    from vllm_lazy_grammar import plugin

    plugin.register()
    seams = plugin.table()._seams
    for seam in seams:
        bound = seam.target.read()
        if isinstance(bound, type):
            bound.__init__ = _witnessed(str(seam.target), bound.__init__)
        elif callable(bound) and hasattr(bound, "__code__"):
            seam.target.bind(_witnessed(str(seam.target), bound))
    (Path(os.environ[FOLDER]) / ALL).write_text("\n".join(plugin.table().targets))
    for settle in dict.fromkeys(seam.settle for seam in seams if seam.settle):
        settle()


install.done = False


def _witnessed(target, function):
    @functools.wraps(function)
    def called(*args, **kwargs):
        (Path(os.environ[FOLDER]) / target).touch()
        return function(*args, **kwargs)

    return called
