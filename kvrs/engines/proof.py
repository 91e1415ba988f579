"""Run-time check that agents' rows equal those that this engine computes. Now and then vLLM's tier
and SGLang's storage do not load a row that they could load, and compare it with the computed one.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from kvrs.transfer.rows.client import RowClient

# One row is compared for every so many prompts of which an agent has rows.
PROMPTS = 32
# Largest `distance` of rows that count as equal. A row from another batch differs by rounding
# errors of all layers; a row of other tokens, weights or layout is unrelated: about 1.4.
_MOST = 0.25
_TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def number_type(groups: int, cache_dtype: str, model_dtype: Any) -> torch.dtype | None:
    """Return the type of all numbers in a row; None: unknown, so rows are not compared."""
    if groups != 1:
        return None  # Rows of several KV cache groups may contain state of another type.
    if cache_dtype == "auto":
        return model_dtype if isinstance(model_dtype, torch.dtype) else None
    return _TYPES.get(cache_dtype)


def distance(
    ours: bytearray | memoryview, theirs: bytearray | memoryview, dtype: torch.dtype
) -> float:
    """Return the norm of the difference of two rows, divided by the norm of `ours`."""
    one, other = (torch.frombuffer(each, dtype=dtype).double() for each in (ours, theirs))
    return float((one - other).norm() / one.norm())


class RowProofs:
    """Chooses the rows that are not loaded but compared, and keeps an agent's bytes of the latest.
    The bytes are read at once, since the agent may later serve this engine's own row.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype  # Type of the numbers in a row; None: rows are not compared.
        self._prompts = 0  # Number of prompts so far of which an agent held rows.
        self._theirs: tuple[bytes, bytearray] | None = None

    def leave_out(self, found: Sequence[bool]) -> int | None:
        """Return the index of the row not to load, the last leading row found, once in `PROMPTS`
        prompts; None: load all rows.
        """
        held = len([*takewhile(bool, found)])
        if held < 2 or self.dtype is None:
            return None
        self._prompts += 1
        return None if self._prompts % PROMPTS else held - 1

    def fetch(
        self, key: bytes, shared: bytes, row_bytes: int, agent: RowClient, timeout_s: float
    ) -> None:
        """Read a row's bytes from an agent, and keep them for the comparison."""
        theirs = bytearray(row_bytes)
        if agent.load([(shared, memoryview(theirs))], timeout_s):
            self._theirs = key, theirs

    def due(self, keys: Sequence[bytes]) -> tuple[int, bytearray] | None:
        """Return the index of the row to compare and the agent's bytes of it, if the row is among
        `keys`, which are computed now; else None.
        """
        if self._theirs is None or self._theirs[0] not in keys:
            return None
        (key, theirs), self._theirs = self._theirs, None
        return keys.index(key), theirs

    def differ(self, ours: bytearray | memoryview, theirs: bytearray | memoryview) -> bool:
        return self.dtype is not None and not are_alike(ours, theirs, self.dtype)


def are_alike(
    ours: bytearray | memoryview, theirs: bytearray | memoryview, dtype: torch.dtype
) -> bool:
    """Return whether two rows are equal up to rounding; a row with a NaN equals only the same
    bytes.
    """
    return bytes(ours) == bytes(theirs) or distance(ours, theirs, dtype) <= _MOST
