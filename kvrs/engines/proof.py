"""The proof at run time that rows of agents are what this engine computes: now and then a row that
could be loaded is left out, and compared once the engine has computed it. vLLM's tier and SGLang's
store do so.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from kvrs.transfer.rows.client import RowClient

# Prompts with rows at an agent, for each one of which a row is computed.
PROMPTS = 32
# A row that is computed in another batch differs by roundings through all layers. One of other
# tokens, weights or layout has nothing in common with it: about 1.4.
_MOST = 0.25
_TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def number_type(groups: int, cache_dtype: str, model_dtype: Any) -> torch.dtype | None:
    """Return the type of all numbers of a row; None: it is not known, and nothing is proved."""
    if groups != 1:
        return None  # A row may be state of another type.
    if cache_dtype == "auto":
        return model_dtype if isinstance(model_dtype, torch.dtype) else None
    return _TYPES.get(cache_dtype)


def distance(
    ours: bytearray | memoryview, theirs: bytearray | memoryview, dtype: torch.dtype
) -> float:
    """Return the norm of the difference, in parts of the norm of ours."""
    one, other = (torch.frombuffer(each, dtype=dtype).double() for each in (ours, theirs))
    return float((one - other).norm() / one.norm())


class RowProofs:
    """The row that is left out. An agent's bytes of it are read at once, since later the agent may
    serve those of this engine.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype  # As `number_type` has it.
        self._prompts = 0  # With rows at an agent.
        self._theirs: tuple[bytes, bytearray] | None = None

    def leave_out(self, found: Sequence[bool]) -> int | None:
        """Return the place of the row that is not to be loaded: the last one of some prompts."""
        held = len([*takewhile(bool, found)])
        if held < 2 or self.dtype is None:
            return None
        self._prompts += 1
        return None if self._prompts % PROMPTS else held - 1

    def fetch(
        self, key: bytes, shared: bytes, row_bytes: int, agent: RowClient, timeout_s: float
    ) -> None:
        """Read an agent's bytes of a row."""
        theirs = bytearray(row_bytes)
        if agent.load([(shared, memoryview(theirs))], timeout_s):
            self._theirs = key, theirs

    def due(self, keys: Sequence[bytes]) -> tuple[int, bytearray] | None:
        """Return the place of the row that was left out, now that it is computed, and the agent's
        bytes.
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
    """False also where a number is none."""
    return bytes(ours) == bytes(theirs) or distance(ours, theirs, dtype) <= _MOST
