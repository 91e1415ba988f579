"""The pace of a scripted worker, without computation."""

import argparse
import asyncio
import math


class Prompts:
    """A worker's computation of prompts: one after the other, at a rate."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._computing = asyncio.Lock()

    async def compute(self, tokens: int) -> None:
        async with self._computing:
            await asyncio.sleep(tokens / self._tokens_per_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pause-s", type=float, default=0.1, help="between two tokens")
    parser.add_argument("--prompt-tokens-per-s", type=float, default=math.inf)
