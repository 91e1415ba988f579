"""The C library keeps the memory of a step for the next one."""

import ctypes
import subprocess
import sys

import pytest

from kvrs_engine.engine import allocator

# Blocks that by default are mapped, or given back together, whenever they are freed.
_FAULTS_PER_STEP = """
import resource, threading
from kvrs_engine.engine.allocator import keep_freed_memory
def step():
    blocks = [bytearray(4 << 20) for _ in range(20)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def steps():
    step()
    before = faults()
    for _ in range(10):
        step()
    print((faults() - before) // 10)
if {kept}:
    assert keep_freed_memory()
thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def _faults_per_step(*, kept: bool) -> int:
    script = _FAULTS_PER_STEP.format(kept=kept)
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return int(answer.stdout)


@pytest.mark.process
def test_a_step_does_not_fault_its_memory_in_again() -> None:
    """80 MB of temporaries, in a thread as the engine computes: 20,000 pages of 4 KB, or fewer
    where the system has larger ones.
    """
    if not allocator.keep_freed_memory():
        pytest.skip("this C library has no mallopt")

    kept = _faults_per_step(kept=True)

    assert kept < 100 < _faults_per_step(kept=False)


def test_a_c_library_without_mallopt_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Musl has none, and macOS another allocator."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())

    assert allocator.keep_freed_memory() is False

    monkeypatch.setattr(sys, "platform", "darwin")
    assert allocator.keep_freed_memory() is False
