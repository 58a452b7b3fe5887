"""All compiled code, compiled once: at an engine's start, or when the package is set up.

Invariants:
- After `warm` no request's step compiles anything: each module with compiled functions is named here.
"""

from __future__ import annotations

from vllm_lazy_grammar.core import blanks, byte_trie, endings, rows


def warm() -> None:
    """Compile, or load from numba's cache. The first time on a machine it takes some tens of seconds; then less than one."""
    for module in (blanks, byte_trie, rows, endings):
        module.warm()


if __name__ == "__main__":
    warm()
