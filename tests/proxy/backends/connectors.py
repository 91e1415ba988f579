"""Scripted vLLM servers with a scripted connector of kvrs in each."""

import asyncio
from typing import Any

from kvrs.protocol.instance import KvrsParams
from kvrs_testkit.scripted_connector import ScriptedConnector
from kvrs_testkit.vllm_cluster import LONG, Servers, Vllms


def equip(servers: Servers, *names: str) -> None:
    for name in names or servers:
        servers[name].kvrs = ScriptedConnector(name, servers[name].node)


def connector_of(system: Vllms, name: str) -> ScriptedConnector:
    found = system.servers[name].kvrs
    assert found is not None
    return found


async def row_of(system: Vllms, name: str) -> dict[str, Any]:
    return next(row for row in (await system.state())["instances"] if row["id"] == name)


async def capabilities(system: Vllms, name: str) -> list[str]:
    load = (await row_of(system, name))["load"]
    return [] if load is None else [str(each) for each in load["capabilities"] or ()]


async def until_capable(system: Vllms, name: str, wanted: list[str]) -> None:
    async def holds() -> bool:
        return await capabilities(system, name) == wanted

    await system.until(holds)


async def cut_in_mid_stream(
    system: Vllms, pages: int, prompt: list[int] = LONG, **fields: Any
) -> list[int]:
    """A stream that its decode instance loses after three tokens, when the agent of the other node
    has so many pages of it.
    """
    system.shared.prompt_tokens, system.shared.gate_at = len(prompt), 3
    system.shared.gate = asyncio.Event()
    asked = asyncio.create_task(system.ids(prompt, **fields))
    await system.until_streams_hold(3)
    ((stream,),) = [[each["id"] for each in (await system.state())["streams"]]]
    system.agents["agent-n1"].pages[stream] = pages

    async def is_protected() -> bool:
        (row,) = (await system.state())["streams"]
        return bool(row["protected"] == {"agent-n1": pages})

    await system.until(is_protected)
    await system.servers["d0"].kill()
    system.shared.gate.set()
    return await asked


def last_of(system: Vllms, name: str) -> KvrsParams:
    return connector_of(system, name).taken[-1]
