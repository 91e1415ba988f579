"""A seed says everything: an incident that was found in a simulation can be looked at as often as
one likes.
"""

import hashlib
import os
import subprocess
import sys

import pytest

from kvrs_testkit.random_worlds import scenario

DIGEST = """
from tests.sim.test_determinism import digest
print(digest(range(8)))
"""


# `sum` as other versions of Python have it: one value after the other, or exactly.
SUMS = """
import builtins, functools, math, operator
plain = builtins.sum

def of_floats(values, start=0):
    values = [*values]
    if not any(isinstance(value, float) for value in values):
        return plain(values, start)
    return {way}

builtins.sum = of_floats
from tests.sim.test_determinism import digest
print(digest(range(16, 42)))
"""
ONE_AFTER_THE_OTHER = "functools.reduce(operator.add, values, start)"
EXACTLY = "math.fsum([start, *values])"


def digest(seeds: range) -> str:
    """Hash of all that policies were told and asked for, and of what was done in the cluster."""
    found = hashlib.sha256()
    for seed in seeds:
        world = scenario(seed, keep_log=True)
        world.run()
        for lines in (world.cluster.log, *(proxy.log for proxy in world.cluster.proxies)):
            assert lines is not None
            found.update("\n".join(lines).encode())
    return found.hexdigest()


def digest_of(python: str, salt: str, script: str = DIGEST) -> str:
    """The digest that a process of this interpreter computes."""
    return subprocess.run(
        [python, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        env={**os.environ, "PYTHONHASHSEED": salt},
    ).stdout.strip()


@pytest.mark.process
def test_same_seed_gives_the_same_log_in_every_process() -> None:
    """Neither a clock, nor an address, nor the order of a set has a say."""
    logs = {digest_of(sys.executable, salt) for salt in ("0", "77")}

    assert len(logs) == 1
    assert logs == {digest(range(8))}


@pytest.mark.process
def test_same_seed_gives_the_same_log_in_other_versions_of_python() -> None:
    """A simulation can be repeated on a machine with another minor version."""
    others = os.environ.get("KVRS_OTHER_PYTHONS", "").split()
    if not others:
        pytest.skip(
            "KVRS_OTHER_PYTHONS names no interpreters of other versions with kvrs and pytest; "
            "`make test-pythons` makes them"
        )

    assert {digest_of(python, "0") for python in others} == {digest(range(8))}


@pytest.mark.process
@pytest.mark.nightly
def test_no_decision_depends_on_how_a_version_of_python_adds_floats() -> None:
    """From 3.12 on `sum` makes up for errors of rounding; before, it does not."""
    logs = {
        digest_of(sys.executable, "0", SUMS.format(way=way))
        for way in (ONE_AFTER_THE_OTHER, EXACTLY)
    }

    assert len(logs) == 1


def test_other_seeds_give_other_logs() -> None:
    """Guards the test above: the log says something."""
    assert len({digest(range(seed, seed + 1)) for seed in range(8)}) == 8


@pytest.mark.process
def test_simulator_loads_no_tensors() -> None:
    """It is meant for machines without any of that."""
    modules = "kvrs_lab.sim.command, kvrs_testkit.random_worlds"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
