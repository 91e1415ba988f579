"""Seeds as tasks of a Ray cluster, with what stands in for one: which comes first, and which are
refused.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrs import __version__
from kvrs.errors import ConfigError
from kvrs_lab.sim import on_ray
from kvrs_lab.sim.case import SimulateOptions


class Backwards:
    """Tasks end in the order opposite to that in which they were begun."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.begun: list[tuple[Any, ...]] = []
        self.is_open = False

    def init(self, **given: Any) -> None:
        self.is_open = True

    def shutdown(self) -> None:
        self.is_open = False

    def put(self, value: Any) -> Any:
        return value

    def get(self, values: Any) -> Any:
        return values

    def remote(self, **asked: Any) -> Callable[[Callable[..., Any]], Any]:
        self.asked = asked

        def task(function: Callable[..., Any]) -> Any:
            def begin(*given: Any) -> Any:
                self.begun.append(given)
                return function(*given)

            return SimpleNamespace(remote=begin)

        return task

    def wait(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        return waiting[-1:], waiting[:-1]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backwards]:
    cluster = Backwards()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    yield cluster
    assert not cluster.is_open


def test_each_seed_is_a_task_and_comes_as_it_ends(ray: Backwards, tmp_path: Path) -> None:
    """A task gets the trace, whose file is here only, and goes to another machine if its own is
    lost.
    """
    trace = tmp_path / "trace.csv"
    trace.write_text("the trace")
    options = SimulateOptions(trace=trace)

    def run(there: SimulateOptions, seed: int) -> tuple[int, str, bool]:
        assert there.trace is not None
        return seed, there.trace.read_text(), there.trace.parent == tmp_path

    found = on_ray.on_ray("somewhere", options, range(3, 6), run)

    assert [*found] == [(seed, "the trace", False) for seed in (5, 4, 3)]
    assert [seed for *_, seed in ray.begun] == [3, 4, 5]
    assert ray.asked["max_retries"] > 0


def test_a_machine_with_another_version_is_refused(
    ray: Backwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has other results; nothing runs there."""
    monkeypatch.setattr(on_ray, "_run_there", lambda version, *given: on_ray._OtherVersion("0.0.1"))

    with pytest.raises(ConfigError, match=rf"has kvrs 0\.0\.1; allowed: {__version__}, as here$"):
        [*on_ray.on_ray("somewhere", SimulateOptions(), [1], lambda there, seed: seed)]


def test_a_task_looks_at_its_version_first() -> None:
    """That of the caller, which it is told."""

    def run(there: SimulateOptions, seed: int) -> int:
        raise AssertionError("it must not run")

    found = on_ray._run_there("0.0.1", (SimulateOptions(), None, run), 1)

    assert found == __version__
    assert isinstance(found, on_ray._OtherVersion)
