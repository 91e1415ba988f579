"""Copies between rows of host memory and blocks, as the GPU's script makes them, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.gpu import copies
from experiments.gpu.plane import Machine

pytestmark = pytest.mark.nightly

ROWS = np.arange(5, dtype=np.int64)


def test_a_row_s_layers_lie_in_its_blocks() -> None:
    at = Machine(len(ROWS), seed=1)

    at.load(copies.by_memmove, at.address, ROWS[1:])

    row_bytes = at.blocks.row_bytes
    assert [
        at.blocks.bytes_of(row) == at.memory[row * row_bytes :][:row_bytes] for row in range(5)
    ] == [*(False, True, True, True, True)]


def test_a_wrong_row_is_found() -> None:
    """Else the times would be those of copies that do nothing."""
    at = Machine(len(ROWS), seed=1)
    at.load(copies.by_memmove, at.address, ROWS[:-1])

    with pytest.raises(AssertionError, match="row 4 has other bytes"):
        at.check()


@pytest.mark.process
def test_without_a_gpu_the_result_is_void(tmp_path: Path) -> None:
    command = ["-m", "experiments.gpu.plane", "--rows", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *command], check=True, timeout=120, capture_output=True)

    kept = json.loads((tmp_path / "plane.json").read_text())

    assert "there is no GPU" in kept["run"]["void"]
    assert {row["unit"] for row in kept["rows"]} == {"GB/s", "s/GB", "ms/GB", "ms"}
