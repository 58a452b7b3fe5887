"""Machinery for touching foreign code: records of what is rebound, checked first, bound all or nothing, restorable.

Knows no foreign name of its own; a table of seams is made elsewhere.

Invariants:
- After a failed `install` every foreign name is bound to what it was bound to before.
- `install` twice is once; `uninstall` after `install` leaves every name as it was, or changes nothing and raises.
- Checks and facts look at the foreign originals, also while the table is installed.
"""

from __future__ import annotations

import importlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, NamedTuple, Protocol, get_args

from vllm_lazy_grammar.errors import SeamError

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[([^\]]+)\]")
_DESCRIPTORS = (staticmethod, classmethod)
_YES_NO = "no", "yes"


class MissingTargetError(LookupError):
    """A target's module, attribute or item does not exist (any more)."""


@dataclass(frozen=True, slots=True)
class Target:
    """A foreign name: a module and a path of attributes and string items in it, e.g. ``Class.method`` or ``Class.table[key].attr``."""

    module: str
    path: str

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"

    def read(self) -> Any:
        """What the name holds now; a function where the class holds a static or class method. MissingTargetError where it is gone."""
        owner, last = self._owner()
        raw = _get(owner, last, self)
        return raw.__func__ if isinstance(raw, _DESCRIPTORS) else raw

    def bind(self, value: Any) -> None:
        """Let the name hold `value`, kept a static or class method where it was one."""
        owner, last = self._owner()
        raw = _get(owner, last, self)
        _set(owner, last, type(raw)(value) if isinstance(raw, _DESCRIPTORS) else value)

    def _owner(self) -> tuple[Any, str]:
        *steps, last = _steps(self.path)
        owner = _module(self)
        for step in steps:
            owner = _get(owner, step, self)
        return owner, last


def _steps(path: str) -> list[str]:
    """``a.b[c].d`` as ``a``, ``b``, ``[c``, ``d``: an item keeps its bracket."""
    found = list(_STEP.finditer(path))
    if not found or "".join(m.group() for m in found) != path:
        raise ValueError(f"not a path of attributes and items: {path!r}")
    return [m[1] if m[1] is not None else "[" + m[2] for m in found]


def _module(target: Target) -> Any:
    try:
        return importlib.import_module(target.module)
    except ImportError as e:
        raise MissingTargetError(f"{target}: the module can not be imported: {e}") from e


def _get(owner: Any, step: str, target: Target) -> Any:
    if step.startswith("["):
        holder, key = owner, step[1:]
    elif isinstance(owner, (type, ModuleType)):
        holder, key = (
            vars(owner),
            step,
        )  # what it holds itself: rebinding an inherited name would not be undone by restoring it
    else:
        holder, key = {step: getattr(owner, step)} if hasattr(owner, step) else {}, step
    if key not in holder:
        raise MissingTargetError(f"{target}: there is no {key!r}")
    return holder[key]


def _set(owner: Any, step: str, value: Any) -> None:
    if step.startswith("["):
        owner[step[1:]] = value
    else:
        setattr(owner, step, value)


Look = Callable[[Target], Any]
"""Reads a target as the foreign package made it, whatever is installed over it."""


class Check(Protocol):
    """Something about the foreign code that a seam relies on."""

    def fact(self, look: Look) -> str:
        """One line: what there is. MissingTargetError where the target is gone."""

    def complaint(self, look: Look) -> str | None:
        """One line: what does not fit; none where it fits. MissingTargetError where the target is gone."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The function's first parameters have exactly these names, in this order."""

    target: Target
    names: tuple[str, ...]

    def fact(self, look: Look) -> str:
        """The parameters that there are."""
        return f"{self.target}({', '.join(self._present(look))})"

    def complaint(self, look: Look) -> str | None:
        """Says both lists where they differ."""
        present = self._present(look)
        if present[: len(self.names)] == self.names:
            return None
        return f"{self.target}: its parameters begin ({', '.join(self.names)}) no more, but are ({', '.join(present)})"

    def _present(self, look: Look) -> tuple[str, ...]:
        return tuple(inspect.signature(look(self.target)).parameters)


@dataclass(frozen=True, slots=True)
class Accepts:
    """The function has a parameter of this name, wherever it stands."""

    target: Target
    name: str

    def fact(self, look: Look) -> str:
        """Whether it has."""
        return f"{self.target} takes {self.name}: {_YES_NO[self._holds(look)]}"

    def complaint(self, look: Look) -> str | None:
        """Says which is missing."""
        return None if self._holds(look) else f"{self.target}: takes no {self.name!r} any more"

    def _holds(self, look: Look) -> bool:
        return self.name in inspect.signature(look(self.target)).parameters


@dataclass(frozen=True, slots=True)
class LooksUp:
    """The function's code, or that of one of the class's own methods, still looks this name up, so that a rebound one is reached."""

    target: Target
    name: str

    def fact(self, look: Look) -> str:
        """Whether it does."""
        return f"{self.target} looks up {self.name}: {_YES_NO[self._holds(look)]}"

    def complaint(self, look: Look) -> str | None:
        """Says which name is not looked up."""
        return None if self._holds(look) else f"{self.target}: does not look {self.name!r} up any more"

    def _holds(self, look: Look) -> bool:
        found = look(self.target)
        functions = [f for f in vars(found).values() if callable(f)] if isinstance(found, type) else [found]
        codes = [code for f in functions if (code := getattr(inspect.unwrap(f), "__code__", None))]
        return any(self.name in part.co_names for code in codes for part in _codes(code))


@dataclass(frozen=True, slots=True)
class AbstractMethods:
    """The abstract class asks for exactly these methods."""

    target: Target
    names: frozenset[str]

    def fact(self, look: Look) -> str:
        """The methods that there are."""
        return f"{self.target} has the abstract methods {', '.join(sorted(self._present(look)))}"

    def complaint(self, look: Look) -> str | None:
        """Says what came and what went."""
        present = self._present(look)
        if present == self.names:
            return None
        new, gone = sorted(present - self.names), sorted(self.names - present)
        return f"{self.target}: its abstract methods changed: new {new}, gone {gone}"

    def _present(self, look: Look) -> frozenset[str]:
        return frozenset(getattr(look(self.target), "__abstractmethods__", ()))


@dataclass(frozen=True, slots=True)
class Offers:
    """The ``Literal`` has this value."""

    target: Target
    value: str

    def fact(self, look: Look) -> str:
        """The values that there are."""
        return f"{self.target} offers {', '.join(map(str, get_args(look(self.target))))}"

    def complaint(self, look: Look) -> str | None:
        """Says what it offers instead."""
        present = get_args(look(self.target))
        return (
            None if self.value in present else f"{self.target}: does not offer {self.value!r} any more, but {present}"
        )


@dataclass(frozen=True, slots=True)
class Exists:
    """The name exists."""

    target: Target

    def fact(self, look: Look) -> str:
        """What kind of thing it is."""
        return f"{self.target} is a {type(look(self.target)).__name__}"

    def complaint(self, look: Look) -> str | None:
        """None: a missing one raises."""
        look(self.target)
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@dataclass(frozen=True, slots=True)
class Seam:
    """One foreign name that is rebound.

    Args:
        target: the name.
        replace: makes the replacement from what is bound now.
        why: what it is needed for.
        until: what would make it unnecessary.
        checks: what it relies on.
        settle: called after the name was bound or restored, once per function however many seams name it (e.g. to rebuild a schema).
    """

    target: Target
    replace: Callable[[Any], Any]
    why: str
    until: str
    checks: tuple[Check, ...] = ()
    settle: Callable[[], object] | None = None


class SeamState(NamedTuple):
    """A seam's target, what it is needed for, and what of it does not fit: nothing where it holds."""

    target: str
    why: str
    complaints: list[str]


@dataclass(frozen=True, slots=True)
class _Bound:
    seam: Seam
    original: Any
    replacement: Any


class Table:
    """A set of seams that is installed and taken away as a whole. Thread-safe by one lock.

    Args:
        seams: each with another target; bound in this order, restored in reverse.
        version: names the foreign package and its version, for messages.
        tested: the versions that the seams were made for, for messages.
        ways_out: what an operator can do about a mismatch, one sentence each.
    """

    def __init__(
        self, seams: Sequence[Seam], *, version: Callable[[], str], tested: str, ways_out: Sequence[str]
    ) -> None:
        targets = [s.target for s in seams]
        if len(set(targets)) != len(targets):
            raise ValueError("two seams of one table have the same target")
        self._seams = tuple(seams)
        self._version = version
        self._tested = tested
        self._ways_out = tuple(ways_out)
        self._bound: tuple[_Bound, ...] = ()
        self._lock = threading.RLock()

    @property
    def installed(self) -> bool:
        """Whether the seams are bound."""
        return bool(self._bound)

    @property
    def targets(self) -> list[str]:
        """The rebound names, in the table's order."""
        return [str(s.target) for s in self._seams]

    def install(self) -> bool:
        """Bind every seam; False where that was done already. SeamError, and nothing bound, where something does not fit."""
        with self._lock:
            if self._bound:
                return False
            if complaints := list(self._complaints()):
                raise SeamError(self._message(complaints))
            self._bind([_Bound(s, current := s.target.read(), s.replace(current)) for s in self._seams])
            return True

    def uninstall(self) -> bool:
        """Restore every name; False where nothing is bound. SeamError, and nothing restored, where somebody rebound one since."""
        with self._lock:
            rebound = [str(b.seam.target) for b in self._bound if b.seam.target.read() is not b.replacement]
            if rebound:
                raise SeamError(
                    f"not uninstalled: somebody else has rebound {', '.join(rebound)} since; undo that first"
                )
            bound, self._bound = self._bound, ()
            self._restore(bound)
            return bool(bound)

    def states(self) -> list[SeamState]:
        """Each seam, in the table's order; nothing is bound for that."""
        with self._lock:
            return [SeamState(str(seam.target), seam.why, list(self._complaints_of(seam))) for seam in self._seams]

    def facts(self) -> list[str]:
        """What the checks look at, one line each, in the table's order, without repetitions."""
        with self._lock:
            checks = [c for s in self._seams for c in (Exists(s.target), *s.checks)]
            return list(dict.fromkeys(_fact(c, self._look) for c in checks))

    def _look(self, target: Target) -> Any:
        for b in self._bound:
            if b.seam.target == target:
                return b.original
        return target.read()

    def _complaints(self) -> Iterator[str]:
        for seam in self._seams:
            for text in self._complaints_of(seam):
                yield f"{text} (needed: {seam.why})"

    def _complaints_of(self, seam: Seam) -> Iterator[str]:
        found = (_complaint(check, self._look) for check in (Exists(seam.target), *seam.checks))
        return filter(None, found)

    def _message(self, complaints: Sequence[str]) -> str:
        listed = "".join(f"\n  - {c}" for c in dict.fromkeys(complaints))
        ways = "".join(f"\n  - {w}" for w in self._ways_out)
        return f"{self._version()} is not what this package was made for ({self._tested}); nothing was changed.{listed}\nWays out:{ways}"

    def _bind(self, wanted: Sequence[_Bound]) -> None:
        begun: list[_Bound] = []
        try:
            for b in wanted:
                begun.append(b)
                b.seam.target.bind(b.replacement)
            _settle(wanted)
            self._bound = tuple(wanted)
        finally:
            if not self._bound:
                self._restore(begun)

    def _restore(self, bound: Sequence[_Bound]) -> None:
        for b in reversed(bound):
            if b.seam.target.read() is not b.original:
                b.seam.target.bind(b.original)
        _settle(bound)


def _settle(bound: Sequence[_Bound]) -> None:
    for settle in dict.fromkeys(b.seam.settle for b in bound if b.seam.settle is not None):
        settle()


def _fact(check: Check, look: Look) -> str:
    try:
        return check.fact(look)
    except MissingTargetError as e:
        return f"missing: {e}"


def _complaint(check: Check, look: Look) -> str | None:
    try:
        return check.complaint(look)
    except MissingTargetError as e:
        return str(e)
