"""Run-time check that agents' rows equal those that this engine computes. vLLM's tier and SGLang's
storage sometimes leave out a loadable row, and compare it with the computed one.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from kvrs.transfer.rows.client import RowClient

# Number of prompts with rows at an agent, for each of which one row is left out and computed.
PROMPTS = 32
# Largest `distance` of equal rows. A row from another batch differs by rounding errors of all
# layers; a row of other tokens, weights or layout is unrelated: about 1.4.
_MOST = 0.25
_TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def number_type(groups: int, cache_dtype: str, model_dtype: Any) -> torch.dtype | None:
    """Return the dtype of all numbers of a row; None: unknown, and rows are not checked."""
    if groups != 1:
        return None  # A row may contain state of another dtype.
    if cache_dtype == "auto":
        return model_dtype if isinstance(model_dtype, torch.dtype) else None
    return _TYPES.get(cache_dtype)


def distance(
    ours: bytearray | memoryview, theirs: bytearray | memoryview, dtype: torch.dtype
) -> float:
    """Return the norm of the difference, relative to the norm of `ours`."""
    one, other = (torch.frombuffer(each, dtype=dtype).double() for each in (ours, theirs))
    return float((one - other).norm() / one.norm())


class RowProofs:
    """Chooses rows to leave out, and keeps the agent's bytes of the latest. These are read at once,
    since the agent may later serve this engine's own row.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype  # Result of `number_type`.
        self._prompts = 0  # Number of prompts so far with rows at an agent.
        self._theirs: tuple[bytes, bytearray] | None = None

    def leave_out(self, found: Sequence[bool]) -> int | None:
        """Return the index of the row to leave out, the last found row of every few prompts."""
        held = len([*takewhile(bool, found)])
        if held < 2 or self.dtype is None:
            return None
        self._prompts += 1
        return None if self._prompts % PROMPTS else held - 1

    def fetch(
        self, key: bytes, shared: bytes, row_bytes: int, agent: RowClient, timeout_s: float
    ) -> None:
        """Read a row's bytes from an agent."""
        theirs = bytearray(row_bytes)
        if agent.load([(shared, memoryview(theirs))], timeout_s):
            self._theirs = key, theirs

    def due(self, keys: Sequence[bytes]) -> tuple[int, bytearray] | None:
        """Return the index of the left-out row once it is computed, and the agent's bytes."""
        if self._theirs is None or self._theirs[0] not in keys:
            return None
        (key, theirs), self._theirs = self._theirs, None
        return keys.index(key), theirs

    def differ(self, ours: bytearray | memoryview, theirs: bytearray | memoryview) -> bool:
        return self.dtype is not None and not are_alike(ours, theirs, self.dtype)


def are_alike(
    ours: bytearray | memoryview, theirs: bytearray | memoryview, dtype: torch.dtype
) -> bool:
    """Return True if two rows are equal up to rounding; a NaN equals nothing."""
    return bytes(ours) == bytes(theirs) or distance(ours, theirs, dtype) <= _MOST
