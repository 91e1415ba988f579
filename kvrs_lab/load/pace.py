"""Compares the steps that instances report during a run with those of the profile that sets their
pace.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvrs.profiles.catalog import decode_table
from kvrs.profiles.tables import DecodeGrid, DecodeTable
from kvrs_lab.load.admin_port import AdminPort

_INTERVAL_S = 0.5  # Instances report medians of the last steps, about two seconds.


class PaceWatch:
    """Factors from the profile's times to those of steps without and with prompts."""

    def __init__(self, profile: str) -> None:
        self.decodes: list[float] = []
        self.prompts: list[float] = []
        self._table = decode_table(profile)

    async def watch(self, port: AdminPort) -> None:
        """Read the state again and again, until this is cancelled.

        Raises:
            AdminError: the proxy does not answer.
        """
        while True:
            state = await port.state()
            self.decodes += decode_factors(state, self._table)
            self.prompts += prompt_factors(state)
            await asyncio.sleep(_INTERVAL_S)


def decode_factors(state: Mapping[str, Any], table: DecodeTable | DecodeGrid) -> Iterator[float]:
    """Yield the reported time of a step over the table's, for each instance that decodes streams of
    this state.
    """
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for stream in state["streams"]:
        if stream["stage"] == "decode":
            rows[stream["decode"]] += 1
            tokens[stream["decode"]] += (stream["prompt_tokens"] or 0) + stream["output_tokens"]
    for each in state["instances"]:
        step_s, count = (each["load"] or {}).get("step_s"), rows[each["id"]]
        if step_s and count:
            yield step_s / table.seconds_for(count, tokens[each["id"]])


def prompt_factors(state: Mapping[str, Any]) -> Iterator[float]:
    """Yield the reported slowness of each instance that knows it."""
    for each in state["instances"]:
        if (slowness := (each["load"] or {}).get("slowness")) is not None:
            yield slowness
