"""Context of attempts: the core that they report to, and the engines and agents that they call."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from kvrs.config.cluster import Backend as Engine
from kvrs.config.file import Config
from kvrs.config.proxy import Inexact
from kvrs.core.attempt import Attempt
from kvrs.core.control import Control
from kvrs.core.model import events as ev
from kvrs.core.model.live_stream import Complete
from kvrs.ids import InstanceId
from kvrs.proxy.backends.agent import AgentBackend
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs.proxy.fleet.slots import SlotSender
from kvrs.proxy.streams.detached import DetachedPairs
from kvrs.proxy.streams.hand_offs import GivenUpHandOffs
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.open_stream import Failed, OpenStream
from kvrs.proxy.streams.recoveries import RecoveryLog
from kvrs.proxy.streams.responses import Parsers
from kvrs.proxy.streams.tokenizer import LazyTokenizer

log = logging.getLogger(__name__)

# Number of streams, cut by one death, that call in one turn of the event loop: about a
# millisecond's work. With one per turn, the last stream would call when nearly all answers to the
# others are handled.
CALLS_IN_TURN = 8


class AttemptContext:
    """State that all attempts of a proxy share, and the engines and agents that they call."""

    def __init__(
        self,
        config: Config,
        control: Control[OpenStream],
        backends: Mapping[InstanceId, Backend],
        agent_backends: Mapping[InstanceId, AgentBackend],
        files: ModelFiles,
        recoveries: RecoveryLog,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.control = control
        self.backends = backends
        self._files = files
        self.tokenizer = LazyTokenizer(files)
        self.parsers = Parsers()
        # vLLM parses reasoning and tool calls differently in streams and in whole answers, so it is
        # asked for a whole answer with these in one piece.
        self.is_vllm = config.cluster.backend is Engine.VLLM
        self.refuses_inexact = config.proxy.inexact is Inexact.REFUSE
        self.slots = SlotSender(control.slots, agent_backends)
        self.hand_offs = GivenUpHandOffs(control.instances, backends, metrics.hand_offs, clock)
        self.detached = DetachedPairs(control, metrics.detached_pairs, clock)
        self.turns = asyncio.Semaphore(CALLS_IN_TURN)
        # Functions by instance that treat its silence as its end, and return False if the silence
        # is too short for that.
        self.end_watch: dict[InstanceId, Callable[[], bool]] = {}
        # HTTP status of the last busy answer of any instance; 503 before the first.
        self.busy_status = 503
        self.clock = clock
        self._recoveries = recoveries
        self._metrics = metrics

    @property
    def penalises_chats(self) -> bool:
        """Return whether the model's own defaults give chats a `repetition_penalty`."""
        model = self._files.served
        return model is not None and model.default_sampling.get("repetition_penalty", 1) != 1

    def suspect_instance(self, instance: InstanceId) -> bool:
        """Handle an instance's long silence, which may concern several streams; return whether the
        instance is given up.

        A hanging instance sends nothing at all. So its streams are decided together, and it is
        fenced when it wakes.
        """
        end_watch = self.end_watch.get(instance)
        if end_watch is None or self.control.progress.is_heard(instance, self.clock()):
            return False
        return end_watch()

    def resumed(self, attempt: Attempt[OpenStream]) -> None:
        if attempt.live.refused_by:
            blame_refusers(self._metrics, attempt.live)
        attempt.resumed(self.clock())
        if attempt.live.id in self._recoveries.running:
            self._recoveries.resumed(attempt.live.id, attempt.number)

    def attempt_over(self, live: OpenStream, event: ev.AttemptFailed | ev.SlotDenied) -> None:
        match event:
            case ev.SlotDenied():
                self._recoveries.settle(live.id, "denied")
            case ev.AttemptFailed(instance=instance, cause=cause):
                extra = {
                    "stream": live.id,
                    "attempt": event.attempt,
                    "instance": instance,
                    "cause": cause,
                }
                is_doubted = event.failure in (ev.FailureKind.REFUSED, ev.FailureKind.ERROR)
                if is_doubted and not live.journal.output_ids:
                    log.info("attempt refused", extra=extra)
                    live.refused_by = (*live.refused_by, instance)
                elif event.failure is ev.FailureKind.DIFFERS:
                    log.info("output differs", extra=extra)
                else:
                    log.warning("attempt failed", extra=extra)
                    self._metrics.failures.labels(instance).inc()
        # The task that reports here is ending by itself, so it must not be cancelled.
        live.task = None
        self.control.attempt_over(live, event, self.clock())

    def completed(self, live: OpenStream) -> None:
        # Do not cancel the task: it still reads the last bytes of the response, so that the
        # connection can be reused.
        live.task = None
        self.control.end(live, Complete(), self.clock())

    def fail(self, live: OpenStream, failure: Failed, cause: str = "") -> None:
        """End the stream with this failure. `cause`: as in `StreamEnded`."""
        if not live.outcome.done():
            live.outcome.set_result(failure)
        self.control.close(live, self.clock(), cause)


def blame_refusers(metrics: Metrics, live: OpenStream) -> None:
    """Count the refusals of a request that turned out not to be at fault as failures of the
    instances.
    """
    for instance in live.refused_by:
        extra = {"stream": live.id, "instance": instance}
        log.warning("refused a request that is not at fault", extra=extra)
        metrics.failures.labels(instance).inc()
    live.refused_by = ()
