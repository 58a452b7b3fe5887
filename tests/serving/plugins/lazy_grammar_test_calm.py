"""A vLLM plugin for the tests: an engine that waits for its worker sleeps, instead of spinning for a second after each message.

vLLM spins because each step matters; where two servers share two cores, the spinning engines take the time that the models need.

Invariants:
- Only how long a reader spins is changed, not what it reads.
"""

from __future__ import annotations


def install() -> None:
    """Let readers wait for the message's bell at once; any number of times is once."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    (_,) = SpinCondition.__init__.__defaults__  # `busy_loop_s`
    SpinCondition.__init__.__defaults__ = (0,)
