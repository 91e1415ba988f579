"""An agent whose holdings the test sets: it implements the agent's protocol over real sockets, and
has no pages.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.net.http import PieceWriter, answer
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.instance import (
    AgentInfo,
    AgentReport,
    LeaseAnswer,
    LeaseUpdate,
    Slot,
    SlotAnswer,
    SlotRequest,
    SlotUpdate,
)
from kvrs.protocol.rows import RowsReport
from kvrs_testkit.scripted_server import ScriptedServer

CAPACITY_BYTES = 1 << 20


@dataclass(eq=False)
class ScriptedAgent(ScriptedServer):
    pages: dict[str, int] = field(default_factory=dict)  # Leading pages held, by stream.
    denied: list[str] = field(default_factory=list)  # Reported once.
    reserved_bytes: int = 0
    capacity_bytes: int = CAPACITY_BYTES
    lease_updates: list[LeaseUpdate] = field(default_factory=list)
    forgotten: set[str] = field(
        default_factory=set
    )  # Streams whose reservation is reported as unknown.
    watches: int = 0
    slots_free: int = 1 << 30  # So many more are granted.
    slot_wait_s: float = 0.05  # `wait_s` of a denial.
    slot_updates: list[SlotUpdate] = field(default_factory=list)
    slots_lost: set[str] = field(default_factory=set)  # Streams whose slot is reported as ended.
    deaf: bool = False  # It does not answer requests for slots.
    regions: list[Any] = field(default_factory=list)  # As it reports them.
    serves_other_nodes: bool = True
    refused_rows: int = 0

    def add_routes(self, routes: Routes) -> None:
        routes.add("GET", "/kvrs/v1/agent", self._info)
        routes.add("GET", "/kvrs/v1/holdings", self._holdings)
        routes.add("POST", "/kvrs/v1/leases", self._leases)
        routes.add("POST", "/kvrs/v1/slots", self._slots)

    @property
    def renewed(self) -> set[str]:
        return {stream for update in self.lease_updates for stream in update.renew}

    @property
    def released(self) -> set[str]:
        return {stream for update in self.lease_updates for stream in update.release}

    async def _info(self, _: Request) -> Response:
        info = AgentInfo(
            InstanceId(self.id),
            NodeId(self.node),
            self.epoch,
            self.pid,
            1,
            self.capacity_bytes,
            26e9,
        )
        return answer(info)

    async def _holdings(self, request: Request) -> Response:
        writer = PieceWriter(request, "application/x-ndjson")
        self._watching.add(request.connection)
        self.watches += 1
        told: dict[str, int] | None = None
        try:
            while True:
                changed = {
                    stream: pages
                    for stream, pages in self.pages.items()
                    if told is None or told.get(stream) != pages
                }
                changed |= dict.fromkeys(told.keys() - self.pages.keys() if told else (), 0)
                told = dict(self.pages)
                await writer.write(msgspec.json.encode(self._report(changed)) + b"\n")
                self.denied = []
                await asyncio.sleep(float(request.query["watch"]))
                await self.awake.wait()
        finally:
            self.watches -= 1

    def _report(self, changed: dict[str, int]) -> AgentReport:
        return AgentReport(
            epoch=self.epoch,
            reserved_bytes=self.reserved_bytes,
            held_bytes=sum(self.pages.values()) * 4096,
            checkpoints=len(self.pages),
            pages={StreamId(stream): pages for stream, pages in changed.items()},
            denied=[StreamId(stream) for stream in self.denied],
            # Its regions may be such as no agent would report.
            rows=RowsReport(
                tuple(self.regions), self.serves_other_nodes, refused_rows=self.refused_rows
            ),
        )

    async def _leases(self, request: Request) -> Response:
        update = msgspec.json.decode(await request.read(), type=LeaseUpdate)
        self.lease_updates.append(update)
        unknown = [stream for stream in update.renew if stream in self.forgotten]
        return answer(LeaseAnswer(unknown))

    async def _slots(self, request: Request) -> Response:
        update = msgspec.json.decode(await request.read(), type=SlotUpdate)
        self.slot_updates.append(update)
        while self.deaf:
            await asyncio.sleep(0.01)
        acquired = [self._slot(asked) for asked in update.acquire]
        lost = [asked.stream for asked in update.renew if asked.stream in self.slots_lost]
        return answer(SlotAnswer(acquired, lost))

    def _slot(self, asked: SlotRequest) -> Slot:
        if self.slots_free <= 0:
            return Slot(0, self.slot_wait_s)
        self.slots_free -= 1
        return Slot(1000 + asked.attempt)
