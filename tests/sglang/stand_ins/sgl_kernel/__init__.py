"""Stands in for the CPU build of `sgl_kernel`, which no package index has: the one function of it
that SGLang 0.5.23 calls for a dense model on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    places: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    new_places: torch.Tensor,
    *_: object,
) -> None:
    """Note for each request `rows[i]` the places of its tokens `begins[i]` to `ends[i]`."""
    at = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        taken = new_places[at : at + end - begin]
        places[row, begin:end] = taken.to(places.dtype)
        at += end - begin


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
