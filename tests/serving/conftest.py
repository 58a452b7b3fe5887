"""Fixtures and hooks for tests on real servers: grouped by the server they name, which ends with its group.

A test says which with ``pytestmark = pytest.mark.server(LAZY)`` and takes ``server``; one that compares names two and takes ``servers``.

Invariants:
- Tests that name the same server run one after another, in the order of their files, and in one process where there are several.
- A process stops a server before it starts one of another group.
- A failed test shows the end of its servers' logs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.models import demo_model
from tests.serving.servers import Flags, Pool, Server, run_offline

_POOL = pytest.StashKey[Pool]()


def _flags(item: pytest.Item) -> tuple[Flags, ...]:
    """The servers that a test names, in its marker's order."""
    marker = item.get_closest_marker("server")
    return marker.args if marker else ()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the tests of one server together; tests without a server go first, and stay with their file.

    First of all hooks, because ``pytest-xdist --dist loadgroup`` reads the groups in one of its own.
    """
    groups: dict[tuple[Flags, ...], list[pytest.Item]] = {(): []}
    for item in items:
        groups.setdefault(_flags(item), []).append(item)
    items[:] = [item for number, flags in _neighbours(list(groups)) for item in _named(groups[flags], number)]


def _named(items: list[pytest.Item], number: int) -> list[pytest.Item]:
    """The tests, told which of them one process runs: those of a group of servers, or of a file."""
    for item in items:
        item.add_marker(
            pytest.mark.xdist_group(f"servers-{number}" if _flags(item) else item.nodeid.partition("::")[0])
        )
    return items


def _neighbours(left: list[tuple[Flags, ...]]) -> Iterator[tuple[int, tuple[Flags, ...]]]:
    """The groups, each behind one that it shares a server with where there is one; those that do have the same number."""
    last: tuple[Flags, ...] = ()
    number = 0
    while left:
        near = next((flags for flags in left if set(flags) & set(last)), None)
        number += near is None
        last = left[0] if near is None else near
        left.remove(last)
        yield number, last


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop what the next test does not need."""
    pool = item.config.stash.get(_POOL, None)
    if pool is not None:
        pool.keep_only(_flags(nextitem) if nextitem else ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the end of the servers' logs under a failure."""
    report = yield
    pool = item.config.stash.get(_POOL, None)
    if report.failed and pool is not None:
        report.sections.extend((f"log of {flags}", server.log_tail()) for flags, server in pool.running.items())
    return report


@pytest.fixture(scope="session")
def _pool(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Generator[Pool]:
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n[{text}]", flush=True)

    pool = Pool(tmp_path_factory.mktemp("servers"), say)
    pytestconfig.stash[_POOL] = pool
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled run stops its servers too
    yield pool
    pool.keep_only(())
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def servers(request: pytest.FixtureRequest, _pool: Pool) -> list[Server]:
    """The servers that the test's marker names, running."""
    flags = _flags(request.node)
    assert flags, "a test on a server names it: pytest.mark.server(LAZY)"
    _pool.keep_only(flags)
    return [_pool.get(each) for each in flags]


@pytest.fixture
def server(servers: list[Server]) -> Server:
    """The first server that the test's marker names."""
    return servers[0]


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's folder."""
    return demo_model()


@pytest.fixture
def offline(tmp_path: Path) -> Callable[..., Any]:
    """Run Python source that defines ``main()`` in a fresh interpreter; what it returned, through JSON."""

    def run(source: str, **env: str) -> Any:
        return run_offline(source, tmp_path, env.items())

    return run
