"""A network as arrays, for compiled code.

Invariants:
- The states are the network's, in its order; those that it gains (repetitions that have counted so far) are appended by `extend`.
- What a repetition that has happened often enough could still do is left out: its upper bound need not be known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.network import Network, State

UNKNOWN = -1
"""In `following`: not unrolled yet."""


class Arrays(NamedTuple):
    """The states' parts, each behind the places where those of a state begin.

    Args:
        jumps_at: int32[states + 1].
        jumps: int32[jumps].
        spans_at: int32[states + 1].
        spans: int32[spans, 3]: low, high, target.
        calls_at: int32[states + 1].
        calls: int32[calls, 2]: start, target.
        named_at: int32[states + 1].
        named: int32[named]: target.
        final: bool[states].
        shortest: int64[states]: bytes to the rule's end.
        repeated: int32[states]: the start of what a repetition that has not happened often enough repeats; -1 for other states.
        following: int32[states]: the state behind one more of it.
    """

    jumps_at: NDArray[np.int32]
    jumps: NDArray[np.int32]
    spans_at: NDArray[np.int32]
    spans: NDArray[np.int32]
    calls_at: NDArray[np.int32]
    calls: NDArray[np.int32]
    named_at: NDArray[np.int32]
    named: NDArray[np.int32]
    final: NDArray[np.bool_]
    shortest: NDArray[np.int64]
    repeated: NDArray[np.int32]
    following: NDArray[np.int32]


class Flat:
    """The arrays of a network.

    Args:
        network: the grammar.

    Attributes:
        arrays: of all states that were there when it was made, or when `extend` or `follow` last was called.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.arrays = _arrays(network.states, network.shortest)

    def follow(self, number: int) -> None:
        """Unroll the repetition that is counted at a state, as often as it has to happen."""
        network, links = self._network, []
        while _lacks(network.states[number]):
            (call,) = network.calls(number)
            links.append((number, call.target))
            number = call.target
        self.extend()
        for before, behind in links:
            self.arrays.following[before] = behind

    def extend(self) -> None:
        """Take in the states that the network gained, whoever asked for them."""
        old, known = self.arrays, len(self.arrays.final)
        if known == len(self._network.states):
            return
        more = _arrays(self._network.states[known:], self._network.shortest[known:])
        joined = (_joined(name, getattr(old, name), getattr(more, name)) for name in Arrays._fields)
        self.arrays = Arrays(*joined)


def _joined(name: str, mine: NDArray[Any], more: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate((mine, more[1:] + mine[-1] if name.endswith("_at") else more))


def _lacks(state: State) -> bool:
    """Whether a state is a repetition that has not happened often enough."""
    return state.counted is not None and not state.jumps


def _arrays(states: Sequence[State], shortest: Sequence[int]) -> Arrays:
    return Arrays(
        _places(len(state.jumps) for state in states),
        _rows([target for state in states for target in state.jumps]),
        _places(len(state.spans) for state in states),
        _rows([span for state in states for span in state.spans], 3),
        _places(0 if state.repeat else len(state.calls) for state in states),
        _rows([call for state in states if not state.repeat for call in state.calls], 2),
        _places(len(state.named) for state in states),
        _rows([named.target for state in states for named in state.named]),
        np.array([state.final for state in states], np.bool_),
        np.array(shortest, np.int64),
        _rows([state.repeat.start if state.repeat and _lacks(state) else -1 for state in states]),
        np.full(len(states), UNKNOWN, np.int32),
    )


def _places(lengths: Iterable[int]) -> NDArray[np.int32]:
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(list(lengths), dtype=np.int32)))


def _rows(values: Sequence[object], width: int | None = None) -> NDArray[np.int32]:
    found = np.array(values, np.int32)
    return found if width is None else found.reshape(-1, width)
