"""The HTTP face of an agent: what it holds, the leases on it, and the slots of its node."""

from collections.abc import Sequence

from aiohttp import web

from kvrs.agent.node import NodeAgent
from kvrs.errors import RequestError
from kvrs.gossip.membership import Membership
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate, SlotUpdate
from kvrs.transfer import http


def make_app(
    agent: NodeAgent, secret: bytes, membership: Membership | None = None, older: Sequence[bytes] = ()
) -> web.Application:
    """All routes of an agent. Everything but `/healthz` wants the cluster's bearer token."""
    face = _Face(agent, membership)
    app = http.new_app(secret, older=older)
    app.add_routes(
        [
            web.get("/healthz", face.health),
            web.get("/kvrs/v1/agent", face.info),
            web.get("/kvrs/v1/holdings", face.holdings),
            web.post("/kvrs/v1/leases", face.leases),
            web.post("/kvrs/v1/slots", face.slots),
            web.get("/kvrs/v1/members", face.members),
        ]
    )
    return app


class _Face:
    """Handlers; each translates and does nothing else."""

    def __init__(self, agent: NodeAgent, membership: Membership | None) -> None:
        self._agent = agent
        self._membership = membership

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def info(self, request: web.Request) -> web.Response:
        return http.answer(self._agent.info())

    async def holdings(self, request: web.Request) -> web.StreamResponse:
        """Once, or as an endless stream whose end tells the watcher that this process is gone."""
        with self._agent.store.watched() as changes:
            if "watch" not in request.query:
                return http.answer(self._agent.report(changes))
            return await http.watch(request, lambda: self._agent.report(changes))

    async def leases(self, request: web.Request) -> web.Response:
        update = http.decode(await request.read(), LeaseUpdate)
        store = self._agent.store
        store.release(update.release, update.lease_s)
        return http.answer(LeaseAnswer(unknown=store.renew(update.renew, update.lease_s)))

    async def members(self, request: web.Request) -> web.Response:
        """What this member knows by gossip."""
        return http.answer({"members": []} if self._membership is None else self._membership.describe())

    async def slots(self, request: web.Request) -> web.Response:
        update = http.decode(await request.read(), SlotUpdate)
        for asked in (*update.release, *update.renew, *update.acquire):
            if asked.target not in self._agent.targets:
                allowed = ", ".join(self._agent.targets)
                raise RequestError(f"{asked.target!r} is not on node {self._agent.node.id}; allowed: {allowed}", param="target")
        return http.answer(self._agent.update_slots(update))
