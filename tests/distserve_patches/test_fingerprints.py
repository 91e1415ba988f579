import inspect
import shutil
from pathlib import Path

import pytest

from distserve_patches import checkout, fingerprints, upstream
from kvrs.errors import ConfigError


def test_each_file_that_is_missing_or_differs_is_named(distserve: Path, tmp_path: Path) -> None:
    """A user learns which files of a checkout are others, and for which commit kvrs was written;
    one start shows all of them.
    """
    shutil.copytree(distserve / "distserve", tmp_path / "distserve")
    fingerprints.check(tmp_path)
    (tmp_path / "distserve" / "worker.py").unlink()
    with (tmp_path / "distserve" / "engine.py").open("a") as file:
        file.write("#")

    with pytest.raises(ConfigError) as raised:
        fingerprints.check(tmp_path)

    assert raised.value.faults == [
        f"distserve/{fault}; kvrs was written for DistServe at commit 82831f1"
        for fault in ("engine.py: differs", "worker.py: is not there")
    ]


def test_what_kvrs_overrides_is_in_the_table(distserve: Path) -> None:
    """A subclass that overrides a function of upstream's has read it: should it change, the
    subclass is wrong.
    """
    assert overridden() <= {*fingerprints.TABLE}


def overridden() -> set[str]:
    """The files of upstream's classes of which ours override a function."""
    from distserve_patches import blocks, engine, requests, stages, worker

    found = set()
    for module in (blocks, engine, requests, stages, worker):
        for _, ours in inspect.getmembers(module, inspect.isclass):
            theirs = [base for base in ours.__mro__ if base.__module__.startswith("distserve.")]
            names = vars(ours) if ours.__module__ == module.__name__ else ()
            found |= {
                f"{base.__module__.removeprefix('distserve.').replace('.', '/')}.py"
                for base in theirs
                if any(inspect.isfunction(vars(base).get(name)) for name in names)
            }
    return found


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
