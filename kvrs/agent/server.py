"""Runs the agent of one node until it is told to stop."""

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web

from kvrs.agent.gossip import NodeGossip
from kvrs.agent.http import make_app
from kvrs.agent.node import NodeAgent, open_directory
from kvrs.config import Config
from kvrs.ids import NodeId
from kvrs.transfer.fault_route import add_fault_route
from kvrs.transfer.http import naming_port


async def serve(
    config: Config,
    node: NodeId,
    secret: bytes,
    stop: asyncio.Event,
    ready: Callable[[], None],
    older: Sequence[bytes] = (),
) -> None:
    """Serve until `stop` is set, then leave nothing behind; `ready` is called once pages and requests are taken.
    `older`: secrets that are accepted beside the one in use.

    Whatever else ends this leaves the pages to the next agent of this node.

    Raises:
        ConfigError: there is no such node, its directory is not to be had, or a port is in use.
    """
    with open_directory(config, node, secret) as directory:
        agent = NodeAgent(config, node, secret, directory, older)
        gossip = NodeGossip(config, agent, [secret, *older]) if config.gossip.enabled else None
        try:
            await _serve(config, agent, gossip, [secret, *older], stop, ready)
        finally:
            if stop.is_set() or not agent.store.held_bytes:
                agent.store.clear()


async def _serve(
    config: Config,
    agent: NodeAgent,
    gossip: NodeGossip | None,
    ring: Sequence[bytes],
    stop: asyncio.Event,
    ready: Callable[[], None],
) -> None:
    app = make_app(agent, ring[0], None if gossip is None else gossip.membership, ring[1:])
    if config.cluster.allow_faults:
        add_fault_route(app, agent.page_server.faults, {node.id for node in config.cluster.nodes})
    # A watcher that leaves cancels its handler.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5, access_log=None)
    await runner.setup()
    who, settings = f"agent of node {agent.node.id}", agent.node.agent
    works = (agent.expire_leases(), agent.fences.run(), agent.store.grow_ahead(), _wait(stop))
    tasks = [asyncio.create_task(work) for work in works]
    try:
        with naming_port(who, "page_port", settings.host, settings.page_port):
            await agent.start()
        with naming_port(who, "port", settings.host, settings.port):
            await web.TCPSite(runner, settings.host, settings.port, backlog=1024).start()
        if gossip is not None:
            await gossip.start()
            tasks.append(asyncio.create_task(gossip.run()))
        ready()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # A bug must end the process: who does not keep its promises must not look alive.
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if gossip is not None:
            await gossip.close()
        await runner.cleanup()
        await agent.page_server.close()


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()
