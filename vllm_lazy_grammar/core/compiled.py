"""The one way to compile a function with numba: cached between processes where a folder can be written, the GIL released.

Invariants:
- Importing a module compiles nothing; a module with compiled functions has a `warm` that compiles or loads all it needs.
- A package folder that can not be written (a system install) costs nothing: numba then caches in the user's cache folder, and without that in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")


def compiled(function: F) -> F:
    """Compile at the first call with numba, for the argument types of that call; the GIL is released while it runs."""
    try:
        return cast("F", njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba found no folder to cache in: compile once in each process instead
        return cast("F", njit(nogil=True)(function))
