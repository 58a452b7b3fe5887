"""A vLLM plugin for the tests: the CPU platform leaves async scheduling as it was asked for, and says which scheduler runs.

Invariants:
- Only `check_and_update_config`'s one override is undone; whatever else it decides stands.
"""

from __future__ import annotations

import functools


def install() -> None:
    """Wrap the platform's check and the scheduler; any number of times is once."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    if hasattr(CpuPlatform, "lazy_grammar_test_async"):
        return
    CpuPlatform.lazy_grammar_test_async = True
    check, schedule = CpuPlatform.check_and_update_config.__func__, AsyncScheduler.schedule

    @functools.wraps(check)
    def check_and_update_config(cls, vllm_config):
        asked = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    def scheduling(self, *args, **kwargs):
        AsyncScheduler.schedule = schedule
        print(f"lazy-grammar-tests: {type(self).__name__} runs", flush=True)
        return schedule(self, *args, **kwargs)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    AsyncScheduler.schedule = scheduling
