"""Real streams through an instance of four ranks that loses some, again and again, and goes on."""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp

from experiments.anchortp.holding import (
    AGENT,
    NODE,
    RESERVED_BYTES,
    CellsWatch,
    FetchedCells,
    agent_of,
)
from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import RankRequest
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.reformed import Reformed
from kvrs_engine.engine.routes import make_routes
from kvrs_lab.report.metrics import percentile
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import instance_client

SECRET = b"a secret of the experiment, long enough"
LEAST_RANKS = 2
MOST_AMPLIFICATION = 1.05  # Bytes of KV fetched after losses, over those of the lost cells.
MOST_STREAMS_PER_FAULT = 20  # Else ranks were not lost again and again.
# By default ranks that share processors go on without a lost one; where all are needed, it is
# awaited.
DEFAULT, ALL_NEEDED = "as by default", "all ranks needed"
_TELL_S = 10.0
PHASES = ("plan", "move", "join", "probe")  # Of a re-forming.


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    longest_gap_s: float = 0.0
    took_s: float = 0.0
    finished: bool = False


@dataclass(slots=True)
class Passed:
    """One pass of all streams."""

    answers: list[Answer]
    done: list[Reformed]
    faults: Counter[str]
    cells: FetchedCells = field(default_factory=FetchedCells)


async def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=8.0, help="streams per second")
    options = parser.parse_args()
    record = Record(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny"
        write_tiny_model(model, seed=options.seed)
        alone = await serve(model, 1, {}, options)
        passes = {}
        for name, elastic in ((DEFAULT, {}), (ALL_NEEDED, {"min_ranks": options.ranks})):
            through = await serve(model, options.ranks, elastic, options)
            passes[name] = figures_of(alone, through, options.ranks)
    figures = {"passes": passes, "pause_s": passes[DEFAULT]["pause_s"]}
    text = "\n".join(as_text(name, each) for name, each in passes.items())
    print(text)
    void = record.keep(options.out, "in_place", figures, text)
    missed = [f"{name}: {each}" for name in passes for each in misses(passes[name])]
    for each in missed:
        print(f"MISSED: {each}")
    raise SystemExit(1 if missed or void else 0)


def misses(figures: dict[str, Any]) -> list[str]:
    """The requirements that a pass has not met."""
    faults = sum(count for what, count in figures["faults"].items() if what != "in mid-move")
    allowed = figures["streams"] // MOST_STREAMS_PER_FAULT
    found = {
        "streams unfinished": figures["unfinished"],
        **{f"tokens {key}": figures["tokens"][key] for key in ("lost", "repeated", "different")},
        "bytes from the host for ranks that left": figures["leaves"]["host_bytes"],
        "bytes other than planned": not figures["bytes"]["as_planned"],
        "KV fetched over what was lost": figures["cells"]["fetched_over_lost"] > MOST_AMPLIFICATION,
        f"{faults} faults, {allowed} at least": faults < allowed,
    }
    return [what for what, is_wrong in found.items() if is_wrong]


async def serve(
    model: Path, ranks: int, elastic: dict[str, Any], options: argparse.Namespace
) -> Passed:
    place = {"id": "e0", "role": "both", "tp": ranks}
    own, agents = free_ports(2)
    cluster = {
        "model": str(model),
        "engine": {"pages": 2048},
        "nodes": [
            {
                "id": NODE,
                "instances": [place | {"page_port": own}],
                "agent": {"page_port": agents},
            }
        ],
    }
    backup = {"mode": "local", "directory": str(model.parent)}
    config = parse_config({"cluster": cluster, "backup": backup, "elastic": elastic})
    instance = EngineInstance(config, InstanceId("e0"), 1, SECRET)
    async with agent_of(config, SECRET), instance_client(make_routes(instance), SECRET) as client:
        await instance.start()
        watch = CellsWatch(instance)
        choose, faults = random.Random(options.seed), Counter[str]()
        driver = asyncio.create_task(drive(instance, choose, faults)) if ranks > 1 else None
        streams = [
            asyncio.create_task(stream(client, at, at / options.rate))
            for at in range(options.streams)
        ]
        done: dict[int, Reformed] = {}
        telling = asyncio.create_task(tell(instance, streams, faults, done))
        try:
            answers = await asyncio.gather(*streams)
        finally:
            for task in (driver, telling):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            watch.note()
            note(instance, done)
            await instance.close()
        if driver is not None and not driver.cancelled() and driver.exception() is not None:
            raise driver.exception() or AssertionError
        return Passed(list(answers), list(done.values()), faults, watch.found)


async def tell(
    instance: EngineInstance,
    streams: list[asyncio.Task[Answer]],
    faults: Counter[str],
    done: dict[int, Reformed],
) -> None:
    """How far it is, now and then, and what has been done since."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(_TELL_S)
        note(instance, done)
        ended = sum(task.done() for task in streams)
        print(
            f"{time.monotonic() - began_s:.0f} s: {ended} of {len(streams)} streams, "
            f"{faults.total() - faults['in mid-move']} faults, {len(done)} re-formings",
            file=sys.stderr,
            flush=True,
        )


def note(instance: EngineInstance, done: dict[int, Reformed]) -> None:
    """The instance keeps only the last hundred."""
    if isinstance(group := instance.ranks, RankGroup):
        done |= {each.number: each for each in group.reformer.done}


async def drive(instance: EngineInstance, choose: random.Random, faults: Counter[str]) -> None:
    """Lose ranks, one after the other, until the least are left; wait for all, and again."""
    group = instance.ranks
    assert isinstance(group, RankGroup)
    while True:
        while len(group.pids) > LEAST_RANKS:
            await asyncio.sleep(choose.uniform(0.0, 1.5))
            await lose(instance, choose, faults)
            # Half of the next ones are lost in mid-move.
            while choose.random() < 0.5 and group.reforming is not None:
                await asyncio.sleep(0.005)
        while len(group.layout.ranks) < len(group.full.ranks) or group.reforming is not None:
            await asyncio.sleep(0.05)


async def lose(instance: EngineInstance, choose: random.Random, faults: Counter[str]) -> None:
    group = instance.ranks
    assert isinstance(group, RankGroup)
    if len(group.pids) <= LEAST_RANKS:
        return
    rank, pid = choose.choice(sorted(group.pids.items()))
    moving = group.reforming is not None
    what = choose.random()
    if what < 0.2 and not moving:
        await leave(instance, rank, faults)
        return
    if what < 0.44:
        instance.lose_device(rank)
        faults["lose_device"] += 1
    else:
        os.kill(pid, signal.SIGKILL)
        faults["kill"] += 1
    faults["in mid-move"] += moving
    while group.pids.get(rank) == pid:  # Another process may be in its place at once.
        await asyncio.sleep(0.002)


async def leave(instance: EngineInstance, rank: int, faults: Counter[str]) -> None:
    """On purpose, and back once it has gone."""
    group = instance.ranks
    assert isinstance(group, RankGroup)
    ordered = RankRequest(rank, True, instance.epoch)
    if await instance.order_rank(ordered) is not None:
        return  # Another one was lost at this moment, or all are needed.
    faults["leave"] += 1
    while rank in group.layout.ranks:
        await asyncio.sleep(0.002)
    refused = await instance.order_rank(RankRequest(rank, False, instance.epoch))
    assert refused is None, refused


async def stream(client: aiohttp.ClientSession, number: int, at_s: float) -> Answer:
    """Half greedy, half drawn with a seed of their own."""
    choose, found = random.Random(number), Answer()
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [choose.randrange(2, 500) for _ in range(choose.randint(8, 200))],
        "max_tokens": choose.randint(20, 120),
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0.9 * (number % 2),
        "seed": number,
        "stream": True,
    }
    body["kvrs"] = {
        "stream": f"s{number}",
        "attempt": 1,
        "prompt_tokens": len(body["prompt"]),
        "checkpoints": [{"agent": AGENT, "reserved_bytes": RESERVED_BYTES}],
    }
    await asyncio.sleep(at_s)
    async with client.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        last_s = began_s = time.monotonic()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                break
            choice = event["choices"][0]
            found.token_ids += choice.get("token_ids") or []
            found.finished |= choice.get("finish_reason") is not None
            now_s = time.monotonic()
            found.longest_gap_s, last_s = max(found.longest_gap_s, now_s - last_s), now_s
        found.took_s = last_s - began_s
    return found


def figures_of(alone: Passed, through: Passed, ranks: int) -> dict[str, Any]:
    pairs = list(zip(through.answers, alone.answers, strict=True))
    paused = [done for done in through.done if done.paused]
    pauses_s = [pause_s(done) for done in paused]
    moved: Counter[str] = Counter()
    for done in through.done:
        moved.update(done.moved)
    return {
        "streams": len(pairs),
        "unfinished": sum(not ours.finished for ours, _ in pairs),
        "tokens": {
            "all": sum(len(ours.token_ids) for ours, _ in pairs),
            "lost": sum(max(0, len(t.token_ids) - len(o.token_ids)) for o, t in pairs),
            "repeated": sum(max(0, len(o.token_ids) - len(t.token_ids)) for o, t in pairs),
            "different": sum(
                ours != theirs
                for o, t in pairs
                for ours, theirs in zip(o.token_ids, t.token_ids, strict=False)
            ),
        },
        "faults": dict(through.faults),
        "leaves": leaves_of(through.done, ranks),
        "cells": cells_of(through.cells),
        "phases_s": {part: spread([done.phases_s[part] for done in paused]) for part in PHASES},
        "re-formings": Counter(done.way.value for done in through.done),
        "pause_s": spread(pauses_s),
        "predicted_over_real": spread([done.predicted_s / pause_s(done) for done in paused]),
        "longest_gap_s": spread([ours.longest_gap_s for ours, _ in pairs]),
        "longest_gap_alone_s": spread([theirs.longest_gap_s for _, theirs in pairs]),
        "took_mean_s": fmean(ours.took_s for ours, _ in pairs),
        "took_mean_alone_s": fmean(theirs.took_s for _, theirs in pairs),
        "bytes": {
            "planned_host": sum(done.host_bytes for done in through.done),
            "planned_peer": sum(done.peer_bytes for done in through.done),
            **{key: moved[key] for key in ("host", "peer", "kept", "read")},
            "as_planned": all(
                done.moved.get("read", 0) == done.moved.get("host", 0) == done.host_bytes
                and done.moved.get("peer", 0) + done.moved.get("kept", 0) == done.peer_bytes
                for done in through.done
            ),
        },
    }


def pause_s(done: Reformed) -> float:
    """Until the ranks compute again."""
    return sum(done.phases_s.values())


def cells_of(found: FetchedCells) -> dict[str, Any]:
    """KV that was fetched from the node's agent after cells were lost."""
    ratio = found.fetched_bytes / found.lost_bytes if found.lost_bytes else 0.0
    return asdict(found) | {"fetched_over_lost": ratio}


def leaves_of(done: list[Reformed], ranks: int) -> dict[str, Any]:
    """Figures of ranks that left on purpose: fewer compute then, and nothing was lost."""
    degrees = [ranks, *(each.degree for each in done)]
    left = [
        each
        for before, each in zip(degrees, done, strict=False)
        if each.way is Way.RESIZE and each.degree < before
    ]
    return {
        "count": len(left),
        "host_bytes": sum(each.moved.get("host", 0) + each.moved.get("read", 0) for each in left),
        "peer_bytes": sum(each.moved.get("peer", 0) for each in left),
        # From the moment at which nothing is computed: what is moved before stops nothing.
        "pause_s": spread([each.phases_s["join"] + each.phases_s["probe"] for each in left]),
    }


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"p50": percentile(values, 50) or 0.0, "p99": percentile(values, 99) or 0.0}


def as_text(name: str, figures: dict[str, Any]) -> str:
    tokens, moved, pause = figures["tokens"], figures["bytes"], figures["pause_s"]
    gap, alone = figures["longest_gap_s"], figures["longest_gap_alone_s"]
    left, cells = figures["leaves"], figures["cells"]
    phases = ", ".join(
        f"{part} {each.get('p50', 0) * 1e3:.0f} ms" for part, each in figures["phases_s"].items()
    )
    ways = ", ".join(f"{count} {way}" for way, count in sorted(figures["re-formings"].items()))
    faults = ", ".join(f"{count} {what}" for what, count in sorted(figures["faults"].items()))
    return (
        f"{name}: {figures['streams']} streams of {tokens['all']:,} tokens, "
        f"{figures['unfinished']} unfinished\n"
        f"tokens: {tokens['lost']} lost, {tokens['repeated']} repeated, {tokens['different']} "
        f"different\n"
        f"faults: {faults}\n"
        f"re-formings: {ways}; predicted over real p50 "
        f"{figures['predicted_over_real'].get('p50', 0):.2f}\n"
        f"pause of a re-forming after a loss: p50 {pause.get('p50', 0):.3f} s, p99 "
        f"{pause.get('p99', 0):.3f} s\n"
        f"of it p50: {phases}\n"
        f"left on purpose {left['count']} times: {left['host_bytes']:,} bytes from the host, "
        f"{left['peer_bytes']:,} between ranks; pause p50 {left['pause_s'].get('p50', 0):.3f} s\n"
        f"KV from the agent after {cells['losses']} losses of cells: {cells['fetched_bytes']:,} "
        f"bytes for {cells['pages']:,} pages of {cells['whole_bytes']:,}, "
        f"{cells['fetched_over_lost']:.3f} x the cells that were lost of them\n"
        f"longest gap of a stream: p50 {gap['p50']:.3f} s, p99 {gap['p99']:.3f} s; one process "
        f"without faults: p50 {alone['p50']:.3f} s, p99 {alone['p99']:.3f} s\n"
        f"seconds of a stream, mean: {figures['took_mean_s']:.3f}; one process without faults: "
        f"{figures['took_mean_alone_s']:.3f}\n"
        f"weights from the host {moved['host']:,} bytes (planned {moved['planned_host']:,}), read "
        f"{moved['read']:,}; between ranks {moved['peer']:,}, and {moved['kept']:,} where a lost "
        f"process had them (planned {moved['planned_peer']:,})\n"
    )


if __name__ == "__main__":
    asyncio.run(main())
