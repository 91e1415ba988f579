from typing import Any

from kvrs.agent.news import LOOK_S, SILENT_S, News, NodeNews
from kvrs.gossip.facts import Fact, FailureFact, HolderFact, InstanceFact, Kind, LinkFact, SlotsFact, kind_of
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.gpus import GpuHealth, GpuState
from kvrs.protocol.instance import InstanceInfo, LinkReport, LoadReport, MeasuredPrefill, Role

D0, P0 = InstanceId("d0"), InstanceId("p0")
N1, N2 = NodeId("n1"), NodeId("n2")
GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=1, dtype_bytes=2, page_size_tokens=16)
GPU = GpuHealth("GPU-1", 0, GpuState.HEALTHY, "", 0.0)


def info(epoch: int = 1) -> InstanceInfo:
    measured = MeasuredPrefill("", 1, [0.0, 1.0])
    return InstanceInfo(D0, NodeId("n0"), Role.DECODE, epoch, 1, "m", "f", GEOMETRY, 0, 1, [], measured)


def load(epoch: int = 1, links: tuple[LinkReport, ...] = (), **numbers: Any) -> LoadReport:
    fields = {"queued": 0, "running": 0, "free_pages": 1000, "queue_delay_s": 0.0} | numbers
    return LoadReport(epoch=epoch, links=list(links), **fields)


class Looker:
    """Looks as the agent does, four times a second."""

    def __init__(self) -> None:
        self.news = NodeNews([D0, P0])
        self.now_s = 100.0
        self.slots = {D0: (32, 0.0), P0: (32, 0.0)}
        self.gpus = [GPU]
        self.written: list[tuple[float, Kind, str, Fact]] = []

    def look(self) -> News:
        news = self.news.look(self.slots, ("agent-n0", HolderFact(1 << 30, 0)), self.gpus, self.now_s)
        self.written += [(self.now_s, kind_of(fact), name, fact) for name, fact in news.written]
        return news

    def hear(self, report: LoadReport, times: int = 1) -> list[tuple[str, Fact]]:
        written: list[tuple[str, Fact]] = []
        for _ in range(times):
            self.news.reported(D0, report, self.now_s)
            written += self.look().written
            self.now_s += LOOK_S
        return written


def up() -> Looker:
    looker = Looker()
    looker.news.met(D0, info(), looker.now_s)
    looker.hear(load())
    return looker


def test_everything_is_said_once_and_again_only_when_it_matters() -> None:
    """Each entry travels to every node; a record that is rewritten with every report would cost more than it tells."""
    looker = up()
    at_first = {(kind, name) for _, kind, name, _ in looker.written}

    still = looker.hear(load(), 40) + looker.hear(load(running=3, queue_delay_s=0.01, free_pages=900), 40)
    busy = looker.hear(load(running=9, queue_delay_s=1.0, free_pages=500), 40)

    assert at_first == {(Kind.INSTANCE, "d0"), (Kind.SLOTS, "d0"), (Kind.HOLDER, "agent-n0"), (Kind.GPU, "GPU-1")}
    assert (still, busy) == ([], [("d0", InstanceFact(Role.DECODE, 1, 0, 9, 1.0, 500))])


def test_what_changes_all_the_time_is_said_once_a_second() -> None:
    """Traffic is bounded whatever an instance goes through."""
    looker = up()

    written = [fact for turn in range(40) for fact in looker.hear(load(running=100 * (turn % 2)))]

    assert 5 <= len(written) <= 10


def test_a_new_life_is_said_at_once() -> None:
    """Whoever holds the old epoch would wait for an instance that is gone."""
    looker = up()
    looker.news.met(D0, info(epoch=2), looker.now_s)

    assert looker.hear(load(epoch=2)) == [("d0", InstanceFact(Role.DECODE, 2, 0, 0, 0.0, 1000))]


def test_a_lost_instance_is_reported_dead_in_place_of_its_load_until_it_lives_again() -> None:
    """Which of its lives ended, and why: a proxy that still hears of it otherwise knows better."""
    looker = up()
    looker.news.lost(D0, "connection lost", looker.now_s)
    looker.news.lost(D0, "connection refused", looker.now_s)

    dead = looker.look()
    looker.news.met(D0, info(epoch=2), looker.now_s)
    looker.news.reported(D0, load(epoch=2), looker.now_s)
    alive = looker.look()

    assert dead.written == [("d0", FailureFact(1, "connection lost", 0.0))]
    assert set(dead.withdrawn) == {(Kind.INSTANCE, "d0"), (Kind.SLOTS, "d0")}
    assert alive.withdrawn == [(Kind.FAILURE, "d0")]
    assert {name for name, _ in alive.written} == {"d0"}


def test_silence_is_a_loss_and_its_end_a_return() -> None:
    """A process that hangs keeps its connection."""
    looker = up()
    until_s = looker.now_s - LOOK_S + SILENT_S
    while looker.now_s < until_s:
        assert not looker.look().written
        looker.now_s += LOOK_S

    silent = looker.look().written
    back = looker.hear(load())

    assert silent == [("d0", FailureFact(1, f"silent for {SILENT_S:g} s", 0.0))]
    assert ("d0", InstanceFact(Role.DECODE, 1, 0, 0, 0.0, 1000)) in back


def test_an_agent_that_slept_declares_nobody_silent() -> None:
    """It did not listen; what was said meanwhile is still to be read."""
    looker = up()
    looker.now_s += 60.0

    slept = looker.look()

    assert slept == News([], [])


def test_a_link_is_what_the_last_of_the_instances_measured() -> None:
    """Each meters what it pulled; the node has one link all the same."""
    looker = up()
    looker.news.reported(P0, load(links=(LinkReport(N1, 2e9, 1e7, 30.0), LinkReport(N2, 3e9, 1e7, 1.0))), looker.now_s)

    written = dict(looker.hear(load(links=(LinkReport(N1, 1e9, 1e7, 0.5),))))

    assert written == {N1: LinkFact(1e9, 1e7, 0.5), N2: LinkFact(3e9, 1e7, 1.0)}


def test_a_link_that_goes_on_being_measured_does_not_look_old() -> None:
    """Its bound sinks with its age at whoever reads it, so an unchanged rate has to be said again, if seldom."""
    looker = up()

    written = [fact for _ in range(480) for fact in looker.hear(load(links=(LinkReport(N1, 1e9, 1e7, 0.0),)))]

    assert len(written) == 4


def test_free_slots_and_gpus_are_told() -> None:
    """The last free slot matters more than any other, and a failing GPU to everybody."""
    looker = up()
    looker.hear(load(), 8)
    looker.slots[D0] = 30, 0.0
    few = looker.hear(load(), 8)
    looker.slots[D0] = 0, 1.5
    none = looker.hear(load(), 8)
    failing = GpuHealth("GPU-1", 0, GpuState.FAILING, "xid 79", looker.now_s)
    looker.gpus = [failing]

    assert (few, none) == ([], [("d0", SlotsFact(0, 1.5))])
    assert looker.look().written == [("GPU-1", failing)]
