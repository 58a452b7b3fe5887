"""One seam that is not vLLM's: numba's binding of LLVM, where it is in vLLM's way.

Invariants:
- Importing this module loads neither numba nor llvmlite.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_lazy_grammar._seams import Parameters, Seam, Target


def seams() -> list[Seam]:
    """Numba's binding of LLVM answers to every attribute, `__dict__` included; vLLM's CPU worker, which looks through the namespaces of all
    loaded modules when it starts, then fails. Where this version of it does not answer so, nothing needs mending.
    """  # noqa: D205 -- one thought
    from llvmlite.binding import ffi  # noqa: PLC0415 -- with numba, not before it

    if not hasattr(ffi.lib, "__dict__"):
        return []
    return [
        Seam(
            Target("llvmlite.binding.ffi", "_lib_wrapper.__getattr__"),
            _functions_only,
            why="vLLM's CPU worker starts although numba was imported before it",
            until="vLLM's scan for kernels passes over objects that only pretend to have a `__dict__`",
            checks=(Parameters(Target("llvmlite.binding.ffi", "_lib_wrapper.__getattr__"), ("self", "name")),),
        )
    ]


def _functions_only(current: Any) -> Any:
    @functools.wraps(current)
    def getattr_(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return current(self, name)

    return getattr_
