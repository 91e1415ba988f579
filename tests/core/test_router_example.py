"""The example of a router of one's own, and what the deciding core imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvrs.config.policy import PolicyName

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent
# What no library that decides should load: files, their syntax, commands.
FORBIDDEN = ("yaml", "typer", "kvrs.cli", "kvrs.config.file", "kvrs.config.document", "aiohttp")


@pytest.mark.parametrize("policy", PolicyName)
def test_the_streams_of_the_example_survive_a_death(policy: PolicyName) -> None:
    """Two of four streams lose their engine, and end with the tokens of an engine that lives."""
    run = subprocess.run(
        [sys.executable, "examples/router.py", "--policy", policy],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    first, *decided, last = run.stdout.splitlines()
    assert first == "d0 dies under 2 streams"
    assert len(decided) == 2
    assert last == "4 streams of 40 tokens, 0 not as without the death"


@pytest.mark.parametrize("module", ["kvrs.core.recovery", "kvrs.core.control"])
def test_the_core_is_imported_without_files_and_commands(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    loaded = run.stdout.split()
    assert module in loaded
    assert not [name for name in loaded if name.startswith(FORBIDDEN)]
