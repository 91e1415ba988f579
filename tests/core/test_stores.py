"""Streams of engines that share a store of KV are restored out of that, once a test has shown in
each process that it serves right.
"""

from collections import Counter
from typing import Any

import msgspec
import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.core.fleet.tested import Continues, Generated, RestoreTest
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.member import Health
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import STORE, Capability, FetchReport, LoadReport
from kvrs.protocol.rows import RegionReport, RowsReport
from tests.core.policy_harness import GEOMETRY, PolicyHarness, instance_up, only
from tests.core.test_self_tests import Bench

A = StreamId("A")
D0, D1, D2 = (InstanceId(name) for name in ("d0", "d1", "d2"))
HOLDER = InstanceId(STORE)
ONE, OTHER = "store of d0", "store of d2"
OFF = BackupSettings(mode=BackupMode.OFF)


class StoreHarness(PolicyHarness):
    """Servers of vLLM without agents, a store beside them; `d0` has a stream that is to be cut."""

    def __init__(self, *names: str, backup: BackupSettings = OFF) -> None:
        super().__init__(backup=backup)
        for name in names:
            capabilities = [Capability.PREFIX_CACHE]
            self.handle(instance_up(name, capabilities=capabilities, computes_prompts=True))

    def seen(self, name: str, store: ev.StoreSeen | None, epoch: int = 1) -> None:
        self.handle(ev.SelfTested(InstanceId(name), epoch, True, store=store))

    def cut(self) -> list[act.Action]:
        self.decoding("A", 100)
        return self.lose("d0", A=60)


def of(space: str = ONE, *, restores: bool = True, share: float = 1.0) -> ev.StoreSeen:
    return ev.StoreSeen(space, restores, share)


def restore_of(record: act.Recovered) -> Any:
    return next((each for each in record.estimates if each.option is Option.RESTORE), None)


@pytest.mark.parametrize("bytes_per_s", [1e9, 1e6])
def test_a_victim_is_restored_out_of_the_store_where_that_is_sooner(bytes_per_s: float) -> None:
    """No agent is needed. The rate is that of the link from the store, as measured."""
    harness = StoreHarness("d0", "d1")
    for name in ("d0", "d1"):
        harness.seen(name, of())
    harness.handle(ev.LinkMeasured(STORE, NodeId("n1"), bytes_per_s))

    actions = harness.cut()

    restores = bytes_per_s == 1e9
    runs = (act.PageRange(HOLDER, 0, 9, 0),) if restores else ()
    assert only(actions, act.Start).plan == act.Plan(D1, None, runs)
    record = only(actions, act.Recovered)
    assert record.option is (Option.RESTORE if restores else Option.RECOMPUTE)
    transfer_s = 0.002 + 9 * GEOMETRY.page_bytes / bytes_per_s
    assert restore_of(record).transfer_s == pytest.approx(transfer_s)


def test_what_the_store_has_not_is_computed() -> None:
    """By the share that recoveries found in it before: half of nine pages are four."""
    harness = StoreHarness("d0", "d1")
    harness.seen("d0", of())
    harness.seen("d1", of(share=0.5))
    harness.handle(ev.LinkMeasured(STORE, NodeId("n1"), 1e9))

    restore = restore_of(only(harness.cut(), act.Recovered))

    assert restore.transfer_s == pytest.approx(0.002 + 4 * GEOMETRY.page_bytes / 1e9)
    assert restore.compute_s == pytest.approx(0.160 - 0.064, abs=0.02)


@pytest.mark.parametrize(
    ("of_d0", "of_d1"),
    [
        pytest.param(of(), of(OTHER), id="another store"),
        pytest.param(of(), of(restores=False), id="not tested there"),
        pytest.param(of(), None, id="none there"),
        pytest.param(None, of(), id="none where it was"),
        pytest.param(of(), of(share=0.05), id="it has nothing"),
    ],
)
def test_no_other_store_is_a_source(of_d0: ev.StoreSeen | None, of_d1: ev.StoreSeen | None) -> None:
    harness = StoreHarness("d0", "d1")
    harness.seen("d0", of_d0)
    harness.seen("d1", of_d1)

    record = only(harness.cut(), act.Recovered)

    assert (record.option, restore_of(record)) == (Option.RECOMPUTE, None)


def test_the_next_process_restores_nothing_before_its_own_test() -> None:
    harness = StoreHarness("d0", "d1")
    for name in ("d0", "d1"):
        harness.seen(name, of())
    harness.handle(instance_up("d1", 2, computes_prompts=True))

    assert only(harness.cut(), act.Recovered).option is Option.RECOMPUTE


def test_a_planned_move_leaves_its_kv_in_the_store() -> None:
    harness = StoreHarness("d0", "d1")
    for name in ("d0", "d1"):
        harness.seen(name, of())
    harness.handle(ev.LinkMeasured(STORE, NodeId("n1"), 1e9))
    harness.decoding("A", 100)

    actions = harness.handle(ev.DrainOrdered(D0, moves=True, produced_tokens={A: 60}))

    assert only(actions, act.Recovered).option is Option.RESTORE


def test_rows_of_the_servers_own_tier_come_before_a_store() -> None:
    """The agent says what they mean, and news of a store changes nothing of that; without them the
    store is used again.
    """
    harness = StoreHarness("d0", "d1", backup=BackupSettings(mode=BackupMode.LOCAL))
    harness.agents("n0")
    region = RegionReport(D0, "0123456789abcdef", True, 1000, 1 << 16)
    rows = ev.CheckpointsReported(InstanceId("agent-n0"), 1, 0, 0, {}, RowsReport((region,), True))
    member = harness.policy.members[D0]
    harness.seen("d0", of())
    assert (member.shared.in_store, member.shared.rows) == (True, ONE)

    harness.handle(rows)
    harness.seen("d0", of())

    assert (member.shared.has_tier, member.shared.in_store, member.shared.rows) == (
        True,
        False,
        region.namespace,
    )
    harness.handle(ev.CheckpointsReported(InstanceId("agent-n0"), 1, 0, 0, {}))
    harness.seen("d0", of())
    assert (member.shared.has_tier, member.shared.in_store, member.shared.rows) == (
        False,
        True,
        ONE,
    )


def test_a_load_that_fails_is_no_fault_of_the_instance_and_is_not_tried_again() -> None:
    """The store goes on to promise what it has lost: the stream is computed at the same server."""
    harness = StoreHarness("d0", "d1")
    for name in ("d0", "d1"):
        harness.seen(name, of())
    harness.handle(ev.LinkMeasured(STORE, NodeId("n1"), 1e9))
    attempt = only(harness.cut(), act.Start).attempt

    failed = ev.AttemptFailed(A, attempt, HOLDER, "error", 60, False, ev.FailureKind.BROKEN)
    actions = harness.handle(failed)

    assert only(actions, act.Start).plan == act.Plan(D1, None, ())
    assert restore_of(only(actions, act.Recovered)) is None
    assert harness.policy.members[D1].answers.consecutive == 0


# Tests of stores.


class Stored(Bench):
    """All have a store of one kind, but those of `without`."""

    def __init__(self, *names: str, without: str = "") -> None:
        self.without = without
        super().__init__(*names)

    def up(self, name: str, epoch: int = 1, **changes: Any) -> None:
        super().up(name, epoch, **changes)
        known = self.known[InstanceId(name)]
        known.set_info(known.info)
        known.load = LoadReport(
            epoch, 0, 0, 0, 0.0, [], store="" if name in self.without else "mooncake"
        )

    def store(self, name: str) -> ev.StoreSeen | None:
        return self.tests.stores.of(InstanceId(name))

    def has_loaded(self, name: str, attempt: int, loaded: int, computed: int) -> bool:
        report = FetchReport(A, attempt, 0, loaded, computed)
        return self.tests.stores.fetched(InstanceId(name), [report])

    def wait(self) -> None:
        """For a test that is due later."""
        self.now_s = self.tests.next_retry_s(self.now_s) or self.now_s

    def tested(self) -> list[tuple[str, ...]]:
        return [each[1:] for each in self.run() if each[0] == "agent of"]


def test_each_instance_is_to_go_on_behind_what_another_one_has_stored() -> None:
    """Those that have loaded of each other, over however many, have one store."""
    bench = Stored("d0", "d1", "d2")

    assert {target for _, target in bench.tested()} == {"d0", "d1", "d2"}

    stores = [bench.store(name) for name in ("d0", "d1", "d2")]
    assert stores == [ev.StoreSeen(stores[0].namespace, True, 1.0)] * 3 if stores[0] else False
    described = bench.tests.describe(D0) or {}
    assert described["restores"] is True
    assert described["store"] == {
        "kind": "mooncake",
        "restores": True,
        "share": 1.0,
        "is_wrong": False,
        "with": ["d1", "d2"],
    }


def test_servers_without_a_store_or_with_one_of_another_kind_or_model_are_not_tested() -> None:
    bench = Stored("d0", "d1", without="d1")
    assert bench.tested() == []
    bench.known[D1].load = LoadReport(1, 0, 0, 0, 0.0, [], store="lmcache")
    assert bench.tested() == []
    bench = Stored("d0")
    bench.known[D1] = bench.known[D0].__class__(D1, NodeId("n"), bench.known[D0].role)
    bench.up("d1", model="other")
    assert bench.tested() == []


@pytest.mark.parametrize("wrong", [False, True])
def test_a_store_that_fails_is_withdrawn_and_named(wrong: bool) -> None:
    """With wrong tokens it is not tried again in this process, and recoveries have to find nothing
    in it. One that has nothing may be started later.
    """
    bench = Stored("d0", "d1")
    (bench.wrong if wrong else bench.computing).add("d0")

    assert ("d1", "d0") in bench.tested()

    described = bench.tests.describe(D0) or {}
    assert described["store"]["restores"] is False
    assert described["store"]["is_wrong"] is wrong
    assert described["cause"] == ("wrong" if wrong else "loaded none")
    assert bench.tests.seen(D0).restores is False
    assert bench.tests.stores.distrusts(D0) is wrong
    for _ in range(8):
        bench.wait()
        assert bench.tested() == ([] if wrong else [("d1", "d0")])
    bench.wrong, bench.computing = set(), set()
    bench.wait()
    bench.run()
    assert (bench.store("d0") == bench.store("d1")) is not wrong


def test_no_process_is_believed_for_the_one_before_it() -> None:
    """A restart is when stores go wrong: until its test nothing is to be found there."""
    bench = Stored("d0", "d1")
    assert bench.tests.stores.distrusts(D0)
    bench.run()
    assert not bench.tests.stores.distrusts(D0)

    bench.up("d0", epoch=2)

    assert bench.store("d0") is None
    assert bench.tests.stores.distrusts(D0)
    bench.wait()
    bench.wrong = {"d0"}
    assert bench.tested() == [("d1", "d0")]
    assert bench.store("d0") is None


def test_what_recoveries_find_is_learned_and_a_store_that_loses_all_is_tested_again() -> None:
    """A report is repeated for a few seconds, and counts once."""
    bench = Stored("d0", "d1")
    bench.run()

    assert bench.has_loaded("d0", 1, 160, 161)
    assert not bench.has_loaded("d0", 1, 160, 161)
    store = bench.store("d0")
    assert store is not None
    assert store.share == pytest.approx(0.75)
    assert bench.has_loaded("d0", 2, 0, 321)
    assert bench.tested() == []
    assert bench.has_loaded("d0", 3, 0, 321)

    assert bench.store("d0") == msgspec.structs.replace(store, restores=False, share=0.0)
    assert bench.tests.stores.distrusts(D0)
    assert bench.tested() == [("d1", "d0")]
    assert bench.store("d0") == msgspec.structs.replace(store, share=0.5)


def test_two_groups_that_turn_out_to_share_one_store_are_one() -> None:
    bench = Stored("d0", "d1", "d2", "d3")
    stores = bench.tests.stores
    bench.tests.news(bench.known)
    stores.passed(D1, D0)
    stores.passed(InstanceId("d3"), D2)
    assert bench.store("d1") != bench.store("d3")

    stores.passed(D2, D1)

    spaces = {each.namespace for name in bench.known if (each := stores.of(name))}
    assert len(spaces) == 1
    assert {str(each.instance) for each in bench.tests.news(())} == {"d0", "d1", "d2", "d3"}


def test_a_store_is_tested_after_the_tokens_of_its_instance() -> None:
    bench = Stored("d0", "d1")
    bench.generates["d0"] = Generated((1, 2, 3), (4, 5, 6), Continues.SEEDED)
    first = bench.tests.next(0.0)
    assert not isinstance(first, RestoreTest)
    assert bench.known[D0].health is Health.UP


def test_an_instance_that_ends_in_its_tests_of_a_store_is_tested_no_more() -> None:
    bench = Stored("d0", "d1")
    ends = Counter[str]()
    for epoch in range(2, 12):
        try:
            test = bench.next_restore()
        except AssertionError:  # None is left.
            break
        ends[str(test.target)] += 1
        bench.lose(test.target)
        bench.tests.failed(test, "connection lost", bench.now_s)
        bench.up(str(test.target), epoch)
        bench.now_s += 100.0
    assert max(ends.values()) == 2


def test_a_process_is_not_trusted_before_it_tells_of_its_store() -> None:
    """Streams that wait for it are decided as it comes up, before its first load report."""
    bench = Stored("d0", "d1")
    bench.has_loaded("d0", 1, 0, 0)
    bench.run()
    bench.up("d0", 2)
    bench.known[D0].load = None
    assert bench.tests.stores.distrusts(D0)
    bench.tests.forget(D0)
    assert not bench.tests.stores.distrusts(D0)


def test_a_test_that_was_not_carried_out_shows_nothing_of_a_store() -> None:
    """Its holder has died, perhaps: that is when its streams go to the target."""
    bench = Stored("d0", "d1")
    test = bench.next_restore()
    bench.tests.failed(test, "connection lost", bench.now_s)
    assert bench.tests.stores.distrusts(test.target)


def test_rows_of_agents_are_tested_behind_a_store_too() -> None:
    bench = Stored("d0", "d1")
    bench.run()
    for name in (D0, D1):
        bench.known[name].set_rows("rows")
    bench.tests._loads_rows_of = lambda *_: True
    bench.tests.rows_changed()
    assert not bench.next_restore().in_store


def test_nothing_is_waited_for_where_no_test_is_left() -> None:
    bench = Stored("d0", "d1")
    bench.wrong = {"d0", "d1"}
    bench.run()
    assert bench.tests.next_retry_s(bench.now_s + 1e6) is None


def test_a_test_that_shows_nothing_comes_later_each_time() -> None:
    bench, pauses = Stored("d0", "d1"), list[float]()
    for _ in range(6):
        test = bench.next_restore()
        bench.tests.put_off(test, "others load", bench.now_s)
        if test.target == D0:
            pauses.append(bench.tests.processes[D0].of_rows.at_s - bench.now_s)
        bench.now_s += 1000.0
    assert len(pauses) > 1
    assert pauses == sorted(set(pauses))
