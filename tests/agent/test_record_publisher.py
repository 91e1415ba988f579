"""Facts that an agent publishes about its node, and when."""

from kvrs.agent.record_publisher import (
    POLL_INTERVAL_S,
    REPORT_TIMEOUT_S,
    RecordChanges,
    RecordPublisher,
)
from kvrs.gossip.facts import Fact, FactKind, FailureFact, LinkFact
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.gpus import GpuHealth, GpuState
from kvrs.protocol.instance import LinkReport, LoadReport

D0, P0 = InstanceId("d0"), InstanceId("p0")
N1, N2 = NodeId("n1"), NodeId("n2")
GPU = GpuHealth("GPU-1", 0, GpuState.HEALTHY, "", 0.0)


def load(epoch: int = 1, *links: LinkReport) -> LoadReport:
    return LoadReport(
        epoch=epoch, links=list(links), queued=0, running=0, free_pages=1000, queue_delay_s=0.0
    )


class PollingAgent:
    """Polls as the agent does, four times per second."""

    def __init__(self) -> None:
        self.publisher = RecordPublisher()
        assert [self.publisher.add(name) for name in (D0, P0, D0)] == [True, True, False]
        self.now_s = 100.0
        self.gpus = [GPU]

    def look(self) -> RecordChanges:
        return self.publisher.changes(self.gpus, self.now_s)

    def report(self, report: LoadReport, times: int = 1) -> list[tuple[str, Fact]]:
        written: list[tuple[str, Fact]] = []
        for _ in range(times):
            self.publisher.on_report(D0, report, self.now_s)
            written += self.look().written
            self.now_s += POLL_INTERVAL_S
        return written


def up() -> PollingAgent:
    agent = PollingAgent()
    agent.report(load())
    return agent


def test_an_entry_is_written_again_only_on_a_significant_change() -> None:
    """Each entry is replicated to every node; one per report would cost more than it is worth."""
    agent = PollingAgent()

    at_first = agent.report(load(1, LinkReport(N1, 1e9, 1e7, 0.0)), 8)
    still = agent.report(load(1, LinkReport(N1, 1.1e9, 2e7, 0.0)), 8)
    slower = agent.report(load(1, LinkReport(N1, 5e8, 1e7, 0.0)), 8)

    assert at_first == [("GPU-1", GPU), (N1, LinkFact(1e9, 1e7, 0.0))]
    assert (still, slower) == ([], [(N1, LinkFact(5e8, 1e7, 0.0))])


def test_an_entry_is_written_at_most_once_per_second() -> None:
    """Traffic is bounded whatever an instance does."""
    agent = up()

    written = [
        fact
        for turn in range(40)
        for fact in agent.report(load(1, LinkReport(N1, 1e9 * (1 + turn % 2), 0.0, 0.0)))
    ]

    assert 5 <= len(written) <= 10


def test_a_lost_instance_has_a_failure_until_it_is_back() -> None:
    """With its epoch and cause: a proxy that still gets reports of it ignores the failure."""
    agent = up()
    agent.publisher.on_lost(P0, "connection refused", agent.now_s)
    agent.publisher.on_lost(D0, "connection lost", agent.now_s)
    agent.publisher.on_lost(D0, "connection refused", agent.now_s)

    dead = agent.look()
    agent.publisher.on_report(D0, load(epoch=2), agent.now_s)
    alive = agent.look()

    assert dead.written == [("d0", FailureFact(1, "connection lost", 0.0))]
    assert alive == RecordChanges([], [(FactKind.FAILURE, "d0")])


def test_silence_is_a_loss_and_its_end_a_return() -> None:
    """A process that hangs keeps its connection open."""
    agent = up()
    until_s = agent.now_s - POLL_INTERVAL_S + REPORT_TIMEOUT_S
    while agent.now_s < until_s:
        assert not agent.look().written
        agent.now_s += POLL_INTERVAL_S

    silent = agent.look().written
    agent.publisher.on_report(D0, load(), agent.now_s)

    assert silent == [("d0", FailureFact(1, f"silent for {REPORT_TIMEOUT_S:g} s", 0.0))]
    assert agent.look().withdrawn == [(FactKind.FAILURE, "d0")]


def test_an_agent_that_was_stopped_declares_no_instance_silent() -> None:
    """The reports of that time are still unread."""
    agent = up()
    agent.now_s += 60.0

    slept = agent.look()

    assert slept == RecordChanges([], [])


def test_the_latest_measurement_of_a_link_is_published() -> None:
    """Each instance measures its own transfers; the node has one link."""
    agent = up()
    agent.publisher.on_report(
        P0,
        load(1, LinkReport(N1, 2e9, 1e7, 30.0), LinkReport(N2, 3e9, 1e7, 1.0)),
        agent.now_s,
    )

    written = dict(agent.report(load(1, LinkReport(N1, 1e9, 1e7, 0.5))))

    assert written == {N1: LinkFact(1e9, 1e7, 0.5), N2: LinkFact(3e9, 1e7, 1.0)}


def test_a_link_with_recent_measurements_is_refreshed() -> None:
    """The lower bound of its rate falls with its age, so an unchanged rate is written again, if
    seldom.
    """
    agent = up()

    written = [
        fact for _ in range(480) for fact in agent.report(load(1, LinkReport(N1, 1e9, 1e7, 0.0)))
    ]

    assert len(written) == 4


def test_a_failing_gpu_is_written_at_once() -> None:
    """Streams leave it before it dies."""
    agent = up()
    failing = GpuHealth("GPU-1", 0, GpuState.FAILING, "xid 79", agent.now_s)
    agent.gpus = [failing]

    assert agent.look().written == [("GPU-1", failing)]
