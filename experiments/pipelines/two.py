"""Two pipelines with a host for each stage, what is read of their state, and what of them dies."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from experiments.rig import draw
from kvrs.config.file import Config, parse_config
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.traces.records import ReplayRequest

PIPELINES = 2
LOOK_S = 0.03
Row = dict[str, Any]


def config_of(
    stages: int,
    *,
    group: bool,
    ring: bool = False,
    seed: int = 0,
    engine: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """A node for each stage; `group`: the pipelines lend each other the hosts of their stages;
    `ring`: and keep replicas of each other's pages.
    """
    nodes: list[Row] = [{"id": f"n{number}"} for number in range(PIPELINES * stages)]
    for pipeline in range(PIPELINES):
        own = nodes[pipeline * stages : (pipeline + 1) * stages]
        instance = {"id": f"d{pipeline}", "role": "both", "pp": stages}
        instance["stage_hosts"] = [{"node": node["id"]} for node in own]
        own[0]["instances"] = [instance | ({"group": "g"} if group else {})]
    return parse_config(
        {
            "cluster": {"nodes": nodes, "engine": {"seed": seed, **engine}},
            "proxy": {"port": 0, "admin_port": 0},
        }
        | ({"backup": {"mode": "peer"}} if ring else {})
    )


def requests_of(
    count: int, per_s: float, tokens: tuple[int, int], seed: int
) -> list[ReplayRequest]:
    """Short prompts at random moments; every second stream is sampled with a seed of its own."""
    rng, at_s, found = random.Random(seed), 0.0, []
    for number in range(count):
        at_s += rng.expovariate(per_s)
        prompt = draw(rng, rng.randint(8, 60))
        heat, own_seed = (0.8, seed + number) if number % 2 else (0.0, None)
        found.append(ReplayRequest(at_s, tuple(prompt), rng.randint(*tokens), heat, own_seed))
    return found


class Pipelines:
    """The instances as the proxy's state shows them."""

    def __init__(self, port: AdminPort) -> None:
        self._port = port

    async def rows(self) -> dict[str, Row]:
        return rows_of(await self._port.state())

    async def until(
        self, holds: Callable[[dict[str, Row]], bool], max_s: float
    ) -> dict[str, Row] | None:
        """The rows for which it holds; None: that took too long."""
        give_up_s = time.monotonic() + max_s
        while time.monotonic() < give_up_s:
            rows = await self.rows()
            if holds(rows):
                return rows
            await asyncio.sleep(LOOK_S)
        return None

    async def streams_at(self, name: str) -> dict[str, int]:
        """The attempts of the streams that decode there."""
        streams = (await self._port.state())["streams"]
        decoding = [row for row in streams if row["decode"] == name and row["output_tokens"]]
        return {row["id"]: row["attempt"] for row in decoding}

    async def recoveries(self) -> list[Row]:
        return list((await self._port.state())["recoveries"])


def rows_of(state: Row) -> dict[str, Row]:
    return {row["id"]: row for row in state["instances"]}


def serves(row: Row, stages: int) -> bool:
    """It computes, perhaps with a borrowed stage."""
    return (
        row["health"] == "up" and row["state"] not in (None, "reforming") and has_all(row, stages)
    )


def has_all(row: Row, stages: int) -> bool:
    return len(row["stages"]) == stages == len({rank["stage"] for rank in row["ranks"]})


def is_whole(row: Row, stages: int) -> bool:
    """It computes, each stage in its own host."""
    return serves(row, stages) and not any(donors_of(row))


def donors_of(row: Row) -> list[str | None]:
    """The donor of each stage; None: its own host has it."""
    return [stage.get("donor") for stage in row["stages"]]


def parts_of(rows: Mapping[str, Row]) -> dict[str, tuple[int, int]]:
    """The host of each stage, by name, as its process and the bytes of weights that it has read;
    a stage that is borrowed has none.
    """
    return {
        f"{name}-stage-{stage['stage']}": (stage["host_pid"], stage["read_bytes"])
        for name, row in rows.items()
        for stage in row["stages"]
        if stage.get("donor") is None
    }


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Death:
    """One death of a series, or several that belong together."""

    kind: str
    pipeline: int
    stage: int
    other: int  # Another stage of that pipeline.
    after_s: float  # Since both pipelines were whole.
    later_s: float  # Of the second one, where it comes into a re-forming.


KINDS = ("host", "two hosts", "head", "mid-join", "donor")


def deaths_of(count: int, stages: int, seed: int) -> list[Death]:
    """Every kind in turn, in another order each time, of random pipelines and stages."""
    rng, kinds, found = random.Random(f"deaths {seed}"), list[str](), []
    for _ in range(count):
        kinds = kinds or rng.sample(KINDS, len(KINDS))
        stage, other = rng.sample(range(stages), 2)
        found.append(
            Death(
                kinds.pop(),
                rng.randrange(PIPELINES),
                stage,
                other,
                rng.uniform(0.5, 2.0),
                rng.uniform(0.0, 0.3),
            )
        )
    return found


def longest_gap_s(times_s: Sequence[float], from_s: float, to_s: float) -> float:
    """Between two tokens, of which the later one comes after `from_s` and the earlier one before
    `to_s`; 0: there are none.
    """
    pairs = pairwise(times_s)
    return max((late - early for early, late in pairs if late > from_s and early < to_s), default=0)
