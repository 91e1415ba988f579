"""Facts that an agent publishes about its node, and when."""

from typing import Any

from kvrs.agent.record_publisher import (
    POLL_INTERVAL_S,
    REPORT_TIMEOUT_S,
    RecordChanges,
    RecordPublisher,
)
from kvrs.gossip.facts import (
    Fact,
    FactKind,
    FailureFact,
    HolderFact,
    InstanceFact,
    LinkFact,
    SlotsFact,
    kind_of,
)
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import GpuHealth, GpuState, LinkReport, LoadReport, Role

D0, P0 = InstanceId("d0"), InstanceId("p0")
N1, N2 = NodeId("n1"), NodeId("n2")
GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=1, dtype_bytes=2, page_size_tokens=16)
GPU = GpuHealth("GPU-1", 0, GpuState.HEALTHY, "", 0.0)


def load(epoch: int = 1, links: tuple[LinkReport, ...] = (), **numbers: Any) -> LoadReport:
    fields = {"queued": 0, "running": 0, "free_pages": 1000, "queue_delay_s": 0.0} | numbers
    return LoadReport(epoch=epoch, links=list(links), **fields)


class PollingAgent:
    """Polls as the agent does, four times per second."""

    def __init__(self) -> None:
        self.publisher = RecordPublisher()
        assert [self.publisher.add(name, Role.DECODE) for name in (D0, P0, D0)] == [
            True,
            True,
            False,
        ]
        self.now_s = 100.0
        self.slots = {D0: (32, 0.0), P0: (32, 0.0)}
        self.gpus = [GPU]
        self.written: list[tuple[float, FactKind, str, Fact]] = []

    def look(self) -> RecordChanges:
        publisher = self.publisher.changes(
            self.slots, ("agent-n0", HolderFact(1 << 30, 0)), self.gpus, self.now_s
        )
        self.written += [
            (self.now_s, kind_of(fact), name, fact) for name, fact in publisher.written
        ]
        return publisher

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
    agent = up()
    at_first = {(kind, name) for _, kind, name, _ in agent.written}

    still = agent.report(load(), 40) + agent.report(
        load(running=3, queue_delay_s=0.01, free_pages=900), 40
    )
    busy = agent.report(load(running=9, queue_delay_s=1.0, free_pages=500), 40)

    assert at_first == {
        (FactKind.INSTANCE, "d0"),
        (FactKind.SLOTS, "d0"),
        (FactKind.HOLDER, "agent-n0"),
        (FactKind.GPU, "GPU-1"),
    }
    assert (still, busy) == ([], [("d0", InstanceFact(Role.DECODE, 1, 0, 9, 1.0, 500))])


def test_an_entry_is_written_at_most_once_per_second() -> None:
    """Traffic is bounded whatever an instance does."""
    agent = up()

    written = [fact for turn in range(40) for fact in agent.report(load(running=100 * (turn % 2)))]

    assert 5 <= len(written) <= 10


def test_a_new_epoch_is_written_at_once() -> None:
    """Nodes with the old epoch would wait for an instance that is gone."""
    agent = up()

    assert agent.report(load(epoch=2)) == [("d0", InstanceFact(Role.DECODE, 2, 0, 0, 0.0, 1000))]


def test_a_lost_instance_has_a_failure_in_place_of_its_load_until_it_is_back() -> None:
    """With its epoch and cause: a proxy that still gets reports of it ignores the failure."""
    agent = up()
    agent.publisher.on_lost(D0, "connection lost", agent.now_s)
    agent.publisher.on_lost(D0, "connection refused", agent.now_s)

    dead = agent.look()
    agent.publisher.on_report(D0, load(epoch=2), agent.now_s)
    alive = agent.look()

    assert dead.written == [("d0", FailureFact(1, "connection lost", 0.0))]
    assert set(dead.withdrawn) == {(FactKind.INSTANCE, "d0"), (FactKind.SLOTS, "d0")}
    assert alive.withdrawn == [(FactKind.FAILURE, "d0")]
    assert {name for name, _ in alive.written} == {"d0"}


def test_silence_is_a_loss_and_its_end_a_return() -> None:
    """A process that hangs keeps its connection open."""
    agent = up()
    until_s = agent.now_s - POLL_INTERVAL_S + REPORT_TIMEOUT_S
    while agent.now_s < until_s:
        assert not agent.look().written
        agent.now_s += POLL_INTERVAL_S

    silent = agent.look().written
    back = agent.report(load())

    assert silent == [("d0", FailureFact(1, f"silent for {REPORT_TIMEOUT_S:g} s", 0.0))]
    assert ("d0", InstanceFact(Role.DECODE, 1, 0, 0, 0.0, 1000)) in back


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
        load(links=(LinkReport(N1, 2e9, 1e7, 30.0), LinkReport(N2, 3e9, 1e7, 1.0))),
        agent.now_s,
    )

    written = dict(agent.report(load(links=(LinkReport(N1, 1e9, 1e7, 0.5),))))

    assert (written[N1], written[N2]) == (LinkFact(1e9, 1e7, 0.5), LinkFact(3e9, 1e7, 1.0))


def test_a_link_with_recent_measurements_is_refreshed() -> None:
    """The lower bound of its rate falls with its age, so an unchanged rate is written again, if
    seldom.
    """
    agent = up()

    written = [
        fact
        for _ in range(480)
        for fact in agent.report(load(links=(LinkReport(N1, 1e9, 1e7, 0.0),)))
    ]

    assert len(written) == 4


def test_free_slots_and_gpu_health_are_written() -> None:
    """The last free slot and a failing GPU are significant at once."""
    agent = up()
    agent.report(load(), 8)
    agent.slots[D0] = 30, 0.0
    few = agent.report(load(), 8)
    agent.slots[D0] = 0, 1.5
    none = agent.report(load(), 8)
    failing = GpuHealth("GPU-1", 0, GpuState.FAILING, "xid 79", agent.now_s)
    agent.gpus = [failing]

    assert (few, none) == ([], [("d0", SlotsFact(0, 1.5))])
    assert agent.look().written == [("GPU-1", failing)]
