"""Legs of scripted SGLang pairs are cut before, in and after the transfer of KV: the stream must go
on in another room, and the other leg be closed, but not while KV may be moving.

    python -m experiments.sglang_pairs.scripted [--deaths N]

Proxy and servers are in one process, over sockets of loopback; each tenth death is that of a whole
server.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import parse_config
from kvrs.core.model.member import TRANSFER_S
from kvrs.proxy.server import Proxy
from kvrs_testkit.scripted import Script
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_server import SECRET
from kvrs_testkit.scripted_sglang import Room, SglangScript
from kvrs_testkit.sglang_cluster import TOKENS, Sglangs, document, new_servers
from kvrs_testkit.vllm_cluster import CONFIG

MOMENTS = ("before", "in", "after")
ROLES = ("prefill", "decode")
# What a prefill, or a transfer, takes if it is hit; after a death decode waits for so long.
_LONG_S, NOTICE_S = 0.5, 0.3
_OTHER = {"prefill": "decode", "decode": "prefill"}
_LEFT_S = 2.0  # Within this time after the last death all legs have ended.
_WHOLE_SERVER = 10  # Every so many deaths.


@dataclass
class Found:
    """Counts of one moment and role."""

    deaths: int = 0
    lost: int = 0
    closed: int = 0  # Of the other legs, while KV may have been moving.
    # Of each death the other leg, and the time.
    left: list[tuple[Room, str, float]] = field(default_factory=list)


async def measured(deaths: int, seed: int) -> tuple[dict[str, Found], Counter[str]]:
    """Return counts by moment and role, and of violations and legs that were left open."""
    draw, found = random.Random(seed), {f"{m} {r}": Found() for m in MOMENTS for r in ROLES}
    async with AsyncExitStack() as stack:
        system = await _started(stack)
        for number in range(deaths):
            moment, role = MOMENTS[number % 3], ROLES[number // 3 % 2]
            await _one(system, found[f"{moment} {role}"], moment, role, draw, number)
        await asyncio.sleep(_LEFT_S)
        for each in found.values():
            each.closed = sum(
                room.aborted.get(other) is False and room.ended_s[other] < died_s + TRANSFER_S
                for room, other, died_s in each.left
            )
        left = Counter(violations=len(system.shared.violations), open_legs=system.open_legs)
    return found, left


async def _started(stack: AsyncExitStack) -> Sglangs:
    directory = stack.enter_context(TemporaryDirectory())
    (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
    shared = SglangScript(notice_s=NOTICE_S)
    servers = new_servers(shared)
    for server in servers.values():
        await server.start()
        stack.push_async_callback(server.close)
    ports = {name: server.port for name, server in servers.items()}
    proxy = Proxy(parse_config(document(directory, ports)), SECRET)
    await proxy.start()
    stack.push_async_callback(proxy.close)
    http = await stack.enter_async_context(aiohttp.ClientSession())
    system = Sglangs(proxy, Script(), {}, {}, http)
    system.shared, system.servers = shared, servers
    await system.until_health(**dict.fromkeys(servers, "up"))
    return system


async def _one(
    system: Sglangs, found: Found, moment: str, role: str, draw: random.Random, number: int
) -> None:
    shared = system.shared
    if number % _WHOLE_SERVER == 0:  # No leg of an earlier death is to end with it.
        await system.until(partial(_is_idle, system))
    shared.rooms.clear()
    shared.compute_s = _LONG_S if moment == "before" else 0.0
    shared.transfer_s = _LONG_S if moment == "in" else 0.0
    shared.gate = asyncio.Event() if moment == "after" else None
    shared.gate_at = draw.randrange(1, TOKENS)
    prompt = [draw.randrange(1, 500) for _ in range(shared.prompt_tokens)]
    stream = asyncio.create_task(system.ids(prompt))
    room = await _met(system, moment)
    if moment != "after":
        await asyncio.sleep(draw.uniform(0.0, 0.01))
    shared.compute_s = shared.transfer_s = 0.0
    victim, died_s = None, asyncio.get_running_loop().time()
    if number % _WHOLE_SERVER == 0:
        victim = next(
            each
            for each in system.servers.values()
            if each.role == role and room.bodies[role] in each.bodies
        )
        await victim.kill()
    else:
        room.legs[role].connection.abort()
    if shared.gate is not None:
        shared.gate.set()
    found.deaths += 1
    try:
        async with asyncio.timeout(30.0):
            found.lost += await stream != expected_ids(prompt, TOKENS)
    except (TimeoutError, AssertionError):
        found.lost += 1
    found.left.append((room, _OTHER[role], died_s))
    for server in system.servers.values():
        server.bodies.clear()
    if victim is not None:
        await victim.restart()
        await system.until_health(**dict.fromkeys(system.servers, "up"))


async def _is_idle(system: Sglangs) -> bool:
    return system.open_legs == 0


async def _met(system: Sglangs, moment: str) -> Room:
    """Wait until both legs have met, or the stream decodes."""

    async def has_met() -> bool:
        rooms = list(system.shared.rooms.values())
        if not rooms or len(rooms[-1].bodies) < 2:
            return False
        return moment != "after" or rooms[-1].sent.is_set()

    await system.until(has_met)
    return list(system.shared.rooms.values())[-1]


def as_text(found: dict[str, Found], left: Counter[str], misses: list[str]) -> str:
    lines = ["moment  leg        deaths  lost  closed in flight"]
    for name, each in found.items():
        moment, role = name.split()
        lines.append(f"{moment:<7} {role:<9} {each.deaths:>7,} {each.lost:>5} {each.closed:>17}")
    lines.append(f"left: {left['open_legs']} open legs, {left['violations']} violations")
    return "\n".join([*lines, *(f"MISSED: {each}" for each in misses)]) + "\n"


def missed(found: dict[str, Found], left: Counter[str]) -> list[str]:
    """The bars that are missed."""
    misses = [f"{name}: {each.lost} lost; bar 0" for name, each in found.items() if each.lost]
    misses += [
        f"{name}: {each.closed} closed in flight; bar 0"
        for name, each in found.items()
        if each.closed
    ]
    return misses + [f"{count} {what}; bar 0" for what, count in left.items() if count]


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--deaths", type=int, default=1000)
    options = parser.parse_args()
    record = Record(options.seed, timed=False)  # The bar holds beside other work, too.
    found, left = asyncio.run(measured(options.deaths, options.seed))
    misses = missed(found, left)
    text = as_text(found, left, misses)
    document: dict[str, Any] = {
        "deaths": sum(each.deaths for each in found.values()),
        "lost": sum(each.lost for each in found.values()),
        "closed_in_flight": sum(each.closed for each in found.values()),
        **left,
    }
    print(text)
    record.keep(options.out, "scripted", document, text)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
