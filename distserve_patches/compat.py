"""Patches that let DistServe run under today's Python and Ray, and report its failures. The README
gives the reason of each patch.
"""

import asyncio
from collections.abc import Iterable
from typing import Any


def apply() -> None:
    """Patch DistServe; once per process, workers included."""
    import distserve.single_stage_engine as engines

    engines.asyncio = Asyncio()


class Asyncio:
    """`asyncio` for the stage engines."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def wait(calls: Iterable[Any]) -> None:
        """Wait for all calls, Ray's references among them; then raise the first failure."""
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
