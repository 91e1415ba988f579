"""A recovery option is one file and its registration: the rest of the product shows and uses it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
PACKAGES = ("kvrs", "kvrs_engine", "kvrs_lab")

# Recomputes in half the time: what an engine that reads histories by a faster kernel would do.
OPTION = '''"""Fast recompute: as recompute, in half the time."""


from msgspec.structs import replace

from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.options.base import Case
from kvrs.core.options.recompute import RECOMPUTE


def estimate(case: Case, estimates: list[Estimate]) -> None:
    found: list[Estimate] = []
    RECOMPUTE.estimate(case, found)
    for each in found:
        halves = {name: getattr(each, name) / 2 for name in ("total_s", "compute_s")}
        estimates.append(replace(each, option=Option.FAST_RECOMPUTE, **halves))


FAST_RECOMPUTE = replace(RECOMPUTE, option=Option.FAST_RECOMPUTE, estimate=estimate)
'''


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} in {path}"
    path.write_text(text.replace(old, new))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The product with one option more: its file, its name, its place in the list."""
    compiled = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=compiled)
    options = tmp_path / "kvrs" / "core" / "options"
    (options / "fast_recompute.py").write_text(OPTION)
    replaced(
        options.parent / "model" / "estimates.py",
        '    ABORT = "abort"\n',
        '    ABORT = "abort"\n    FAST_RECOMPUTE = "fast_recompute"\n',
    )
    replaced(
        options / "__init__.py",
        "from kvrs.core.options.in_place import",
        "from kvrs.core.options.fast_recompute import FAST_RECOMPUTE\n"
        "from kvrs.core.options.in_place import",
    )
    replaced(options / "__init__.py", "RECOMPUTE, REPLAY)", "RECOMPUTE, REPLAY, FAST_RECOMPUTE)")
    return tmp_path


def run(tree: Path, *arguments: str) -> Any:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kvrs", *arguments],
        cwd=tree,
        env=environment,
        check=True,
        capture_output=True,
        timeout=120,
    )
    return done.stdout


def test_it_is_explained_and_recovers_streams(tree: Path) -> None:
    """With no other file of the product changed. An attempt that fails by its option strikes the
    option off, and its stream is recomputed: seed 3 has no such attempt.
    """
    profile = "opt-13b-a100-kvrs-seed"
    explained = json.loads(
        run(tree, "lab", "explain", "--profile", profile, "--prompt-tokens", "1477", "--json")
    )
    asked = ("--requests", "60", "--deaths", "8", "--seed", "3", "--json")
    outcome = json.loads(run(tree, "lab", "simulate", *asked))

    options = [each["option"] for each in explained["answer"]["options"]]
    assert {"fast_recompute", "recompute"} <= set(options)
    totals = outcome["policies"]["auto"]["totals"]
    assert int(totals["  by fast_recompute"]) > 0
    assert "  by recompute" not in totals
