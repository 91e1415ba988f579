"""HTTP routes of an agent: its checkpoints, the leases on them, the slots of its node, gossip."""

from kvrs.agent.node import NodeAgent
from kvrs.errors import RequestError
from kvrs.gossip.membership import Membership
from kvrs.net import http
from kvrs.net.heartbeats import add_heartbeats
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate, SlotUpdate
from kvrs.protocol.secrets import Scope


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
