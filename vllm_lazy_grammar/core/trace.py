"""What the gate of one request did, for the one line that tells an operator why a trigger fired or did not.

Invariants:
- Events that were taken back are not told: the list is cut where a rollback cuts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.transcript import Fed
    from vllm_lazy_grammar.core.triggers import Trigger


class Event(NamedTuple):
    """Something the gate did at one output token (counted from 0); `replay` is what the grammar was fed then, or refused."""

    kind: Literal["fired", "refused", "rearmed"]
    token: int
    trigger: Trigger | None
    replay: tuple[Fed, ...] = ()


@dataclass(slots=True)
class Trace:
    """One request's events and what its masks cost.

    Attributes:
        eager: no trigger was asked for.
        events: what happened, in order.
        joined_seconds: time the engine's step waited for the compile.
        fill_seconds: time spent making rows; a copied row adds nothing.
        rows: rows that were made.
        tail_rows: those of them that left out tokens which would fire with a replay that the grammar refuses.
        forced_rows: those that left only the way into a trigger.
        led_out: some row was narrowed so that the answer ends within its budget.
        forced_seconds: time spent looking for forced tokens; nothing where the row was there.
        endings_seconds: time the engine's steps waited for how the grammar ends.
        needed: tokens that the shortest text needs, where it does not fit into the budget; None where it does, or was not looked at.
        budget_lost: a budget was asked for and can not be kept: the grammar's endings are not known.
        drafts_offered: tokens that the grammar drafted.
        drafts_accepted: how many of them the model wrote.
        error: why the request was ended by us, if it was.
    """

    eager: bool
    events: list[Event] = field(default_factory=list)
    joined_seconds: float = 0.0
    fill_seconds: float = 0.0
    rows: int = 0
    tail_rows: int = 0
    forced_rows: int = 0
    led_out: bool = False
    forced_seconds: float = 0.0
    endings_seconds: float = 0.0
    needed: int | None = None
    budget_lost: bool = False
    drafts_offered: int = 0
    drafts_accepted: int = 0
    error: str | None = None

    def describe(self) -> str:
        """The gate's story in one line."""
        if self.error is not None:
            return f"ended: {self.error}"
        if self.eager:
            return "eager"
        return "; ".join(map(_told, self.events)) or "never fired"

    def describe_budget(self) -> str:
        """What became of the budget; empty where it was kept."""
        if self.budget_lost:
            return "; the end could not be planned: it is not known how this grammar's texts end"
        return "" if self.needed is None else f"; {self.needed} tokens were needed where fewer were left"


def _told(event: Event) -> str:
    match event.kind:
        case "fired":
            return f"fired at token {event.token} by {event.trigger}"
        case "refused":
            return f"disarmed at token {event.token}: the grammar refuses what follows {event.trigger}"
        case _:
            return f"re-armed at token {event.token}"
