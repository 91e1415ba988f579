import importlib
import inspect
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distserve_patches import checkout, fingerprints, upstream
from distserve_patches.fingerprint_table import TABLE
from kvrs.errors import ConfigError


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A module in place of upstream, and a table that knows it."""
    (tmp_path / "stand_in.py").write_text(
        "class Engine:\n    def step(self):\n        return 1\n\ndef other():\n    return 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stand_in", raising=False)
    linecache.clearcache()
    table = {name: fingerprints.fingerprint("stand_in", name) for name in ("Engine.step", "other")}
    monkeypatch.setattr(fingerprints, "TABLE", {"stand_in": table})
    return importlib.import_module("stand_in")


def test_functions_as_they_were_pass(module: ModuleType) -> None:
    """The table has hashes of sources, not of objects: a second import is equal."""
    fingerprints.check()


def test_a_function_that_differs_is_named(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user learns which function of which module is another one, and for which commit kvrs was
    written.
    """

    def step(self: Any) -> int:
        return 3

    monkeypatch.setattr(module.Engine, "step", step)

    with pytest.raises(ConfigError, match=r"^stand_in\.Engine\.step: differs; .* 82831f1$"):
        fingerprints.check()


def test_all_differences_are_reported_at_once(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing functions are faults too, and one start shows all of them."""
    monkeypatch.delattr(module.Engine, "step")
    monkeypatch.delattr(module, "other")

    with pytest.raises(ConfigError) as raised:
        fingerprints.check()

    assert [fault.split(";")[0] for fault in raised.value.faults] == [
        "stand_in.Engine.step: is not there",
        "stand_in.other: is not there",
    ]


def test_upstream_is_the_one_that_kvrs_was_written_for(distserve: Path) -> None:
    """Loading checks it; patched and all, it still passes."""
    fingerprints.check()


@pytest.mark.parametrize(
    "name",
    [
        "distserve.worker.ParaWorker.step",
        "distserve.single_stage_engine.DecodingStageLLMEngine._step",
    ],
)
def test_an_upstream_function_that_differs_is_named(
    distserve: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also below Ray's decorator."""
    import distserve.single_stage_engine as engines

    *_, holder, function = name.split(".")
    changed = checkout.para_worker() if holder == "ParaWorker" else getattr(engines, holder)

    async def another(self: Any) -> None:
        pass

    monkeypatch.setattr(changed, function, another)

    with pytest.raises(ConfigError, match=f"^{name}: differs"):
        fingerprints.check()


def test_what_kvrs_overrides_is_in_the_table(distserve: Path) -> None:
    """A subclass that overrides a function of upstream's has read it: should it change, the
    subclass is wrong.
    """
    unknown = [
        f"{base.__module__}.{base.__qualname__}.{name}"
        for base, name in overridden()
        if not in_table(base, name)
    ]

    assert not unknown


def overridden() -> set[tuple[type, str]]:
    """Functions that our classes override, each with the upstream class that has it."""
    from distserve_patches import blocks, engine, requests, stages, worker

    found = set()
    for module in (blocks, engine, requests, stages, worker):
        for _, ours in inspect.getmembers(module, inspect.isclass):
            theirs = [base for base in ours.__mro__ if base.__module__.startswith("distserve.")]
            for name in vars(ours) if ours.__module__ == module.__name__ else ():
                found |= set(
                    [(base, name) for base in theirs if inspect.isfunction(vars(base).get(name))][
                        :1
                    ]
                )
    return found


def in_table(base: type, name: str) -> bool:
    return f"{base.__qualname__}.{name}" in TABLE.get(base.__module__, {})


def test_a_place_without_distserve_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is imported or started, with the name of the variable."""
    monkeypatch.delenv(checkout.HOME_ENV, raising=False)

    with pytest.raises(ConfigError, match=r"^DISTSERVE_HOME: not set"):
        upstream.load()
    with pytest.raises(
        ConfigError, match=f"^DISTSERVE_HOME: got {tmp_path}; allowed: a checkout of DistServe"
    ):
        upstream.load(tmp_path)
