"""The core of a proxy among its engines and agents: what it reports to the core, and from where."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping

from kvrs.config.file import Config
from kvrs.config.proxy import Inexact
from kvrs.core.attempt import Attempt
from kvrs.core.control import Control
from kvrs.core.fleet.known import all_refused
from kvrs.core.live import Complete
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.backends.agent import AgentBackend
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.fleet.leases import LeaseSender
from kvrs.proxy.fleet.slots import SlotSender
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.streams.event_log import EventLog
from kvrs.proxy.streams.live import Failed, OpenStream, Outcome
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.recoveries import RecoveryLog
from kvrs.proxy.streams.shell import TaskShell, blame_refusers
from kvrs.proxy.streams.tokenizer import LazyTokenizer
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.request_context import CURRENT

log = logging.getLogger(__name__)

_REFUSED_RETRY_S = 10.0  # Somebody has to mend the instances first.


class Driver:
    """Sees streams through, and reports to the core. All methods run on one event loop."""

    def __init__(
        self,
        config: Config,
        backends: Mapping[InstanceId, Backend],
        agent_backends: Mapping[InstanceId, AgentBackend],
        metrics: Metrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        event_log: EventLog | None = None,
    ) -> None:
        # A proxy that is started in the place of this one gets another one.
        self.run_id = f"{config.proxy.id}-{secrets.token_hex(8)}"
        self.tokenizer = LazyTokenizer(config.cluster.model)
        self.refuses_inexact = config.proxy.inexact is Inexact.REFUSE
        self.recoveries = RecoveryLog(clock, wall_clock, metrics.recoveries.settled)
        self._shell = TaskShell(self, self.recoveries, metrics, event_log, clock)
        self.control = control = Control[OpenStream](
            config,
            run_id=self.run_id,
            shell=self._shell,
            can_give_end=self.tokenizer.available,
            runs_self_tests=config.proxy.self_test,
        )
        self.backends = backends
        self.agent_backends = agent_backends
        self.leases = LeaseSender(control.leases, self._send_leases, self._retention_lost)
        self.checkpoint_leases = LeaseSender(
            control.checkpoints.leases, self._send_reservations, self._reservations_lost
        )
        self.slots = SlotSender(control.slots, agent_backends)
        # Takes silence for the end; False: it has not lasted for long.
        self.end_watch: dict[InstanceId, Callable[[], bool]] = {}
        self.busy_status = 503
        self.clock = clock
        self._metrics = metrics

    @property
    def streams(self) -> Mapping[StreamId, OpenStream]:
        return self.control.streams

    # Streams.

    async def run(self, journal: Journal, client: Client) -> Outcome:
        """See one stream through; a caller that is cancelled takes the stream with it."""
        if not journal.output_ids and (cause := all_refused(self.control.instances)) is not None:
            message = f"no instance can be used: {cause}"
            body = error_body(message, kind="server_error", code=act.Reason.NO_INSTANCE)
            return Failed(503, body, retry_after_s=_REFUSED_RETRY_S)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        journal.request = request = CURRENT.get()
        if request is not None and request.trace is not None:
            request.trace.opened(journal)
        live = OpenStream(journal=journal, client=client, outcome=outcome, clock=self.clock)
        self._metrics.streams.active.value += 1
        try:
            self.control.open(live, self.clock())
            return await outcome
        finally:
            self.control.close(live, self.clock())

    def end_early(self, stream: StreamId, failure: Failed) -> None:
        """End it for a reason of the proxy's own; nothing happens if it has ended."""
        if (live := self.streams.get(stream)) is not None:
            self.fail(live, failure)

    def fail(self, live: OpenStream, failure: Failed) -> None:
        live.resolve(failure)
        self.control.close(live, self.clock())

    # What attempts report.

    def suspect_instance(self, instance: InstanceId) -> bool:
        """It was silent for too long, perhaps not only for one stream; whether it is given up.

        From an instance that hangs nothing comes at all. So its streams are decided together, and
        it is fenced when it wakes.
        """
        end_watch = self.end_watch.get(instance)
        if end_watch is None or self.control.instances.is_reporting(instance, self.clock()):
            return False
        return end_watch()

    def resumed(self, attempt: Attempt[OpenStream]) -> None:
        if attempt.live.refused_by:
            blame_refusers(self._metrics, attempt.live)
        attempt.resumed(self.clock())
        self.recoveries.resumed(attempt.live.id, attempt.number)

    def attempt_over(self, live: OpenStream, event: ev.AttemptFailed | ev.SlotDenied) -> None:
        match event:
            case ev.SlotDenied():
                self.recoveries.settle(live.id, "denied")
            case ev.AttemptFailed(instance=instance, cause=cause):
                extra = {
                    "stream": live.id,
                    "attempt": event.attempt,
                    "instance": instance,
                    "cause": cause,
                }
                if event.failure is ev.FailureKind.REFUSED and not live.journal.output_ids:
                    log.info("attempt refused", extra=extra)
                    live.refused_by = (*live.refused_by, instance)
                else:
                    log.warning("attempt failed", extra=extra)
                    self._metrics.failures.labels(instance).inc()
        live.task = None  # It is the task that reports this.
        self.control.attempt_over(live, event, self.clock())

    def completed(self, live: OpenStream) -> None:
        # Its task still reads the last bytes of the response, so that the connection can be used
        # again.
        live.task = None
        self.control.end(live, Complete(), self.clock())

    # Leases.

    async def _send_leases(self, instance: InstanceId, update: LeaseUpdate) -> LeaseAnswer:
        if not self.control.instances.is_up(instance):
            raise UpstreamError("not up")
        return await self.backends[instance].leases(update)

    def _retention_lost(self, instance: InstanceId, streams: list[StreamId]) -> None:
        self.control.retention_lost(instance, streams, self.clock())

    async def _send_reservations(self, agent: InstanceId, update: LeaseUpdate) -> LeaseAnswer:
        if not self.control.agents.is_up(agent):
            raise UpstreamError("not up")
        return await self.agent_backends[agent].leases(update)

    def _reservations_lost(self, agent: InstanceId, streams: list[StreamId]) -> None:
        self.control.checkpoints.unknown(agent, streams, self.clock())

    async def close(self) -> None:
        """End every stream with an explicit error, and wait for what runs on their behalf."""
        self._shell.cancel_wakes()
        body = error_body("the proxy is shutting down", kind="server_error", code="shutting_down")
        for live in list(self.streams.values()):
            self.fail(live, Failed(503, body, retry_after_s=1.0))
        await self._shell.close()
        await self.slots.close()
