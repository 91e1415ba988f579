"""Rows that are computed again are compared as numbers: roundings pass, other content does not."""

import pytest
import torch

from kvrs.engines.proof import are_alike, number_type

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def row(seed: int, dtype: torch.dtype, noise: float = 0.0) -> bytearray:
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(seed))
    numbers += noise * torch.randn(4096, generator=torch.Generator().manual_seed(99))
    return bytearray(numbers.to(dtype).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_with_roundings_is_alike_and_another_row_is_not(dtype: torch.dtype) -> None:
    assert are_alike(row(1, dtype), row(1, dtype, noise=0.05), dtype)
    assert not are_alike(row(1, dtype), row(2, dtype), dtype)
    assert not are_alike(row(1, dtype), bytearray(len(row(1, dtype))), dtype)


def test_numbers_that_are_none_are_not_alike() -> None:
    ours = row(1, torch.float32)
    theirs = bytearray(torch.tensor([float("nan")]).numpy().tobytes()) + ours[4:]
    assert not are_alike(ours, theirs, torch.float32)
    assert are_alike(theirs, theirs, torch.float32)


def test_rows_of_unknown_numbers_are_not_compared() -> None:
    """Several groups may have state of another type; a packed cache has no numbers."""
    assert number_type(1, "auto", torch.bfloat16) is torch.bfloat16
    assert number_type(1, "fp8", torch.bfloat16) is torch.float8_e4m3fn
    assert number_type(2, "auto", torch.bfloat16) is None
    assert number_type(1, "auto", "bfloat16") is None
    assert number_type(1, "nvfp4", torch.bfloat16) is None
