"""The process of one agent.

HTTP routes of an agent: its checkpoints, the leases on them, the slots of its node, gossip.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from functools import partial

import aiohttp

from kvrs.agent.gossip import NodeGossip
from kvrs.agent.node import NodeAgent, open_directory
from kvrs.config.file import Config
from kvrs.errors import ConfigError, RequestError
from kvrs.gossip.membership import Membership
from kvrs.ids import NodeId
from kvrs.net import http
from kvrs.net.connections import ConnectionLimits
from kvrs.net.heartbeats import add_heartbeats
from kvrs.net.http import inner_server, naming_port
from kvrs.net.routes import Request, Response, Routes
from kvrs.process.memory import keep_what_is_there, raise_descriptor_limit
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate, SlotUpdate
from kvrs.protocol.secrets import Scope, scoped_keys
from kvrs.transfer.fault_route import add_fault_route

log = logging.getLogger(__name__)


def make_routes(agent: NodeAgent, membership: Membership | None = None) -> Routes:
    """Build the agent's routes. Clients must have proved the agent's key for all routes but
    `/healthz`.
    """
    handlers = Handlers(agent, membership)
    routes = http.authenticated(Scope.AGENT)
    routes.add("GET", "/healthz", handlers.health)
    routes.add("GET", "/kvrs/v1/agent", handlers.info)
    routes.add("GET", "/kvrs/v1/holdings", handlers.holdings)
    routes.add("POST", "/kvrs/v1/leases", handlers.leases)
    routes.add("POST", "/kvrs/v1/slots", handlers.slots)
    routes.add("GET", "/kvrs/v1/members", handlers.members)
    add_heartbeats(routes)
    return routes


class Handlers:
    """Translates between HTTP and the agent."""

    def __init__(self, agent: NodeAgent, membership: Membership | None) -> None:
        self._agent = agent
        self._membership = membership

    async def health(self, request: Request) -> Response:
        return Response()

    async def info(self, request: Request) -> Response:
        return http.answer(self._agent.info())

    async def holdings(self, request: Request) -> Response:
        """Answer with one report, or with `?watch=` an endless stream of reports, which ends with
        this process.
        """
        with self._agent.store.watched() as changes:
            if "watch" not in request.query:
                return http.answer(self._agent.report(changes))
            return await http.watch(request, lambda: self._agent.report(changes))

    async def leases(self, request: Request) -> Response:
        update = http.decode(await request.read(), LeaseUpdate)
        store = self._agent.store
        store.release(update.release, update.lease_s)
        return http.answer(LeaseAnswer(unknown=store.renew(update.renew, update.lease_s)))

    async def members(self, request: Request) -> Response:
        """Answer with the members and facts known by gossip."""
        return http.answer(
            {"members": []} if self._membership is None else self._membership.describe()
        )

    async def slots(self, request: Request) -> Response:
        update = http.decode(await request.read(), SlotUpdate)
        for asked in (*update.release, *update.renew, *update.acquire):
            if asked.target not in self._agent.targets:
                allowed = ", ".join(self._agent.targets)
                raise RequestError(
                    f"{asked.target!r} is not on node {self._agent.node.id}; allowed: {allowed}",
                    param="target",
                )
        return http.answer(self._agent.update_slots(update))


async def serve(
    config: Config,
    node: NodeId,
    secret: bytes,
    stop: asyncio.Event,
    ready: Callable[[], None],
    older: Sequence[bytes] = (),
    read: Callable[[], Config] | None = None,
) -> None:
    """Serve until `stop` is set, then remove all pages. `ready` is called once pages and requests
    are served. `older`: further accepted secrets. At SIGHUP, also serve new instances of the node
    in the configuration that `read` returns.

    After any other end the pages stay for the next agent of this node.

    Raises:
        ConfigError: there is no such node, its directory cannot be used, or a port is in use.
    """
    with open_directory(config, node, secret) as directory:
        agent = NodeAgent(config, node, secret, directory, older)
        gossip = NodeGossip(config, agent, [secret, *older]) if config.gossip.enabled else None
        if read is not None:
            learn = partial(_learn, agent, gossip, read)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, learn)
        try:
            async with agent.new_session() as http:
                await _serve(config, agent, gossip, http, [secret, *older], stop, ready)
        finally:
            if stop.is_set() or not agent.store.held_bytes:
                agent.store.clear()
            if stop.is_set() and agent.anchors is not None:
                agent.anchors.clear()


def _learn(agent: NodeAgent, gossip: NodeGossip | None, read: Callable[[], Config]) -> None:
    try:
        agent.learn(read())
    except ConfigError as error:
        for fault in error.faults:
            log.error("not reloaded", extra={"cause": fault})
        return
    if gossip is not None:
        gossip.learn()
    log.info("reloaded", extra={"instances": len(agent.targets)})


async def _serve(
    config: Config,
    agent: NodeAgent,
    gossip: NodeGossip | None,
    http: aiohttp.ClientSession,
    ring: Sequence[bytes],
    stop: asyncio.Event,
    ready: Callable[[], None],
) -> None:
    routes = make_routes(agent, None if gossip is None else gossip.membership)
    if config.cluster.allow_faults:
        nodes = {node.id for node in config.cluster.nodes}
        add_fault_route(routes, agent.page_server.faults, nodes)
    raise_descriptor_limit()
    keys = scoped_keys(ring, agent.node.agent_id, Scope.AGENT, Scope.ADMIN)
    name, settings = f"agent of node {agent.node.id}", agent.node.agent
    names = {settings.host, *config.security.hosts}
    limits = ConnectionLimits.of_peers()
    port = inner_server(
        routes, limits, shutdown_timeout_s=0.5, names=names, keys=keys, tls=agent.tls
    )
    jobs = (
        agent.expire_leases(),
        agent.end_orphans(),
        agent.settle_regions(),
        agent.fences.run(http),
        agent.store.grow_ahead(),
        _wait(stop),
    )
    tasks = [asyncio.create_task(work) for work in jobs]
    if agent.tls is not None:
        tasks.append(asyncio.create_task(agent.tls.run()))
    try:
        with naming_port(name, "page_port", settings.bound(settings.host), settings.page_port):
            await agent.start()
        with naming_port(name, "port", bind := settings.bound(settings.host), settings.port):
            await port.open(bind, settings.port)
        if gossip is not None:
            await gossip.start()
            tasks.append(asyncio.create_task(gossip.run(http)))
        keep_what_is_there()
        ready()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            # A bug that has ended a job is raised here: a process without one of its jobs must not
            # seem alive.
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if gossip is not None:
            await gossip.close()
        await port.close()
        await agent.close()


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()
