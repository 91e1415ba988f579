"""The book of self-tests: what is tested with what, and what is known in between."""

from typing import Any

import msgspec
import pytest

from kvrs.core.fleet.self_tests import SelfTests
from kvrs.core.fleet.tested import (
    Continues,
    Generated,
    RestoreTest,
    SelfTest,
    TokensTest,
    TransferTest,
)
from kvrs.core.model.events import SelfTested
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, InstanceInfo, MeasuredPrefill, Role

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
EXACT = Generated((1, 2, 3), (4, 5, 6), Continues.SEEDED)
OTHER = Generated((1, 2, 4), (4, 5, 6), Continues.SEEDED)


class Bench:
    """Instances that are up, and tests that are carried out one after the other."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.known = {
            InstanceId(name): Member(InstanceId(name), NodeId("n"), ROLES[name[0]])
            for name in names
        }
        self.tests = SelfTests(self.known, **({"enabled": True, "tests_kv": True} | settings))
        self.generates: dict[str, Generated] = {}
        self.still: set[str] = set()  # To and from these no KV moves.
        self.computing: set[str] = set()  # These load nothing from agents.
        self.wrong: set[str] = set()  # These go on wrongly behind what they load.
        self.now_s = 0.0
        for name in names:
            self.up(name)

    def up(self, name: str, epoch: int = 1, **changes: Any) -> None:
        info = InstanceInfo(
            id=InstanceId(name),
            node=NodeId("n"),
            role=ROLES[name[0]],
            epoch=epoch,
            pid=epoch,
            model="m",
            fingerprint="f",
            geometry=KvGeometry(2, 2, 8, 4, 16),
            max_model_len=100,
            page_port=1,
            capabilities=list(Capability),
            prefill=MeasuredPrefill("t", 1, [0.1, 0.2]),
        )
        known = self.known[InstanceId(name)]
        known.info = msgspec.structs.replace(info, **changes)
        known.health = Health.UP
        self.tests.up(known.info, self.now_s)

    def lose(self, name: str) -> None:
        self.known[InstanceId(name)].health = Health.DOWN
        self.tests.lost(InstanceId(name))

    def wait(self) -> None:
        """Until a test is due that has to wait."""
        self.now_s = self.tests.next_retry_s(self.now_s) or self.now_s

    def next(self) -> SelfTest:
        found = self.tests.next(self.now_s)
        assert found is not None
        return found

    def next_restore(self) -> RestoreTest:
        """The next test of rows or a store, behind all others."""
        while not isinstance(test := self.next(), RestoreTest):
            if isinstance(test, TokensTest):
                self.tests.generated(test, EXACT)
            else:
                self.tests.transferred(test, moved=True)
        return test

    def run(self) -> list[tuple[str, ...]]:
        """Carry out all tests that are due; their instances."""
        done: list[tuple[str, ...]] = []
        while (test := self.tests.next(self.now_s)) is not None:
            match test:
                case TokensTest(instance=name):
                    found, is_prefill = self.generates.get(name, EXACT), name[0] == "p"
                    if is_prefill:
                        self.tests.glimpsed(test, found)
                    self.tests.generated(test, None if is_prefill else found)
                    done.append((name,))
                case TransferTest(holder=holder, target=target):
                    moved = not {holder, target} & self.still
                    self.tests.transferred(test, moved=moved)
                    done.append((holder, target))
                case RestoreTest(holder=holder, target=target):
                    is_wrong = target in self.wrong
                    fault = "loaded none" if target in self.computing else "wrong" * is_wrong
                    self.tests.restored(test, fault, self.now_s, is_wrong=is_wrong)
                    done.append(("agent of", holder, target))
        return done

    def moves(self) -> set[str]:
        return {name for name in self.known if self.tests.seen(name).moves_kv}

    def described(self, name: str) -> dict[str, Any]:
        found = self.tests.describe(InstanceId(name))
        assert found is not None
        return found


def test_every_instance_is_tested_once() -> None:
    """With one that was seen to work, if there is any: as many tests as instances, not pairs."""
    bench = Bench("p0", "p1", "p2", "d0", "d1", "d2")

    done = bench.run()

    assert [test for test in done if len(test) == 1] == [("d0",), ("d1",), ("d2",)]
    assert len([test for test in done if len(test) == 2]) == 5
    assert bench.moves() == {"p0", "p1", "p2", "d0", "d1", "d2"}
    assert bench.run() == []


def test_tests_that_were_not_carried_out_show_nothing_of_kv() -> None:
    """Nothing is fetched until a test shows that KV moves; operators read that it is not known."""
    bench = Bench("p0", "d0")

    while bench.now_s < 1500.0 and (test := bench.tests.next(bench.now_s)) is not None:
        bench.tests.failed(test, "no answer within 60 s", bench.now_s)
        bench.now_s = bench.tests.next_retry_s(bench.now_s) or bench.now_s

    assert bench.moves() == set()
    for name in bench.known:
        shown = bench.tests.describe(name)
        assert shown is not None
        assert (shown["done"], shown["moves_kv"]) == (True, None)


@pytest.mark.parametrize("broken", ["p0", "p1", "d0", "d1"])
def test_the_one_is_blamed_whose_partner_works_with_others(broken: str) -> None:
    """Whichever is tested first."""
    bench = Bench("p0", "p1", "d0", "d1")
    bench.still = {broken}

    bench.run()

    assert bench.moves() == {"p0", "p1", "d0", "d1"} - {broken}
    shown = bench.tests.describe(InstanceId(broken))
    assert shown is not None
    assert "no KV moved" in shown["cause"]
    assert shown["done"]


def test_before_its_test_nothing_is_fetched_and_exactness_is_believed() -> None:
    """A stream that is admitted now is looked at again when it is cut."""
    bench = Bench("p0", "d0")

    assert bench.moves() == set()
    assert bench.tests.continues(InstanceId("d0")) is None
    assert bench.tests.goes_on(None, InstanceId("d0"), sampled=True)


def test_a_process_of_the_same_version_inherits_until_its_test() -> None:
    """Its test waits, so that it takes no time from the streams that the process before it left. Of
    another version nothing is known.
    """
    bench = Bench("p0", "d0")
    bench.run()

    bench.lose("d0")
    bench.up("d0", epoch=2)
    alike = bench.moves()
    bench.still = {"d0"}
    assert bench.run() == []
    bench.wait()
    bench.run()
    contradicted = bench.moves()
    bench.up("d0", epoch=3, fingerprint="g")

    assert alike == {"p0", "d0"}
    assert contradicted == {"p0"}
    assert bench.tests.continues(InstanceId("d0")) is None


def test_a_fence_is_no_new_process() -> None:
    """The epoch rises, the process does not change."""
    bench = Bench("p0", "d0")
    bench.run()

    bench.up("d0", epoch=2, pid=1)

    assert bench.run() == []


def test_a_test_that_fails_is_tried_again_and_then_left() -> None:
    """The pause doubles; behind five tries, the test counts as done, and is tried rarely."""
    bench = Bench("d0")

    pauses_s = []
    while bench.now_s < 1500.0 and (test := bench.tests.next(bench.now_s)) is not None:
        bench.tests.failed(test, "HTTP 500", bench.now_s)
        assert bench.tests.next(bench.now_s) is None
        pauses_s.append((bench.tests.next_retry_s(bench.now_s) or 0.0) - bench.now_s)
        bench.now_s += pauses_s[-1]

    assert pauses_s == [2.0, 4.0, 8.0, 16.0, 600.0, 600.0, 600.0]
    assert bench.tests.describe(InstanceId("d0")) == {
        "done": True,
        "continues": None,
        "moves_kv": None,
        "restores": None,
        "store": None,
        "capabilities": [each.value for each in Capability],
        "differs_from": [],
        "near_ties_with": [],
        "weights": "right",  # Alone, and known by the digest of an engine of kvrs.
        "weights_digest": "",
        "failures": 7,
        "cause": "HTTP 500",
    }


def test_an_instance_that_dies_of_its_test_is_not_killed_for_ever() -> None:
    """Two deaths in its test, one after the other, are enough: the next test comes much later."""
    bench = Bench("d0")

    for epoch in (2, 3):
        test = bench.next()
        bench.lose("d0")
        bench.tests.failed(test, "connection lost", 0.0)
        bench.up("d0", epoch=epoch)

    assert bench.tests.next(599.0) is None
    assert bench.tests.next(600.0) is not None


def test_a_test_that_a_former_process_has_passed_is_to_blame_for_no_death() -> None:
    """Deaths that come in tests by chance leave no process untested, its KV neither."""
    bench = Bench("p0", "d0")
    bench.run()

    for epoch in range(2, 6):
        bench.up("d0", epoch=epoch)
        bench.now_s += 10.0
        assert isinstance(bench.next(), TokensTest)
        bench.lose("d0")
    bench.up("d0", epoch=6)
    bench.now_s += 10.0

    assert bench.run() == [("d0",), ("p0", "d0")]


def test_the_result_of_a_process_that_is_gone_is_dropped() -> None:
    """The next one is tested by itself."""
    bench = Bench("d0")
    late = bench.next()
    assert isinstance(late, TokensTest)

    bench.up("d0", epoch=2)
    again = bench.next()
    bench.tests.generated(late, EXACT)

    assert bench.tests.continues(InstanceId("d0")) is None
    assert isinstance(again, TokensTest)
    bench.tests.generated(again, OTHER)
    assert bench.tests.seen(InstanceId("d0")).generated == OTHER


def test_what_moved_to_a_process_that_is_gone_shows_nothing_of_its_partner() -> None:
    bench = Bench("p0", "d0")
    tokens = bench.next()
    assert isinstance(tokens, TokensTest)
    bench.tests.generated(tokens, EXACT)
    test = bench.next()
    assert isinstance(test, TransferTest)

    bench.up("d0", epoch=2)
    bench.tests.transferred(test, moved=True)

    assert bench.moves() == set()


@pytest.mark.parametrize(
    ("there", "greedy", "sampled"),
    [
        (EXACT, True, True),
        (OTHER, False, True),
        (Generated((1, 2, 3), (4, 5, 7), Continues.SEEDED), True, False),
        (Generated((1, 2, 3), (4, 5, 6), Continues.GREEDY), True, False),
        (Generated((1, 2, 3), (4, 5, 6), Continues.TEXT), False, False),
        (Generated((1, 2, 3), (4, 5, 6), Continues.NONE), False, False),
    ],
)
def test_a_pair_is_exact_where_both_compute_the_same(
    there: Generated, greedy: bool, sampled: bool
) -> None:
    """And the second one goes on after a cut as it would have gone on without."""
    bench = Bench("d0", "d1")
    bench.generates["d1"] = there
    bench.run()
    began = bench.tests.processes.get(InstanceId("d0"))

    for is_sampled, expected in ((False, greedy), (True, sampled)):
        found = bench.tests.goes_on(began, InstanceId("d1"), sampled=is_sampled)
        assert found == expected


@pytest.mark.parametrize(("there", "expected"), [((4, 5, 6), True), ((4, 7, 7), False)])
def test_a_sampled_output_is_generated_again_where_the_same_numbers_are_drawn(
    there: tuple[int, ...], *, expected: bool
) -> None:
    """Also at instances that do not go on with one; where the draws differ, heads are marked."""
    bench = Bench("d0", "d1")
    bench.generates["d0"] = Generated((1, 2, 3), (4, 5, 6), Continues.GREEDY)
    bench.generates["d1"] = Generated((1, 2, 3), there, Continues.GREEDY)
    bench.run()
    began = bench.tests.processes.get(InstanceId("d0"))

    assert bench.tests.goes_on(began, InstanceId("d1"), sampled=True, replays=True) == expected
    assert bench.tests.comparison.sampled_ties != expected


def test_a_former_process_of_the_same_name_is_another_instance() -> None:
    """It may have come back with another TP."""
    bench = Bench("d0")
    bench.run()
    began = bench.tests.processes.get(InstanceId("d0"))
    bench.generates["d0"] = OTHER

    bench.up("d0", epoch=2, fingerprint="g")
    bench.run()

    assert not bench.tests.goes_on(began, InstanceId("d0"), sampled=False)


@pytest.mark.parametrize("settings", [{"enabled": False}, {"tests_kv": False}])
def test_without_tests_everything_is_believed(settings: dict[str, bool]) -> None:
    """Instances have their declared capabilities when no tests are configured."""
    bench = Bench("p0", "d0", **settings)

    assert bench.moves() == {"p0", "d0"}


def test_a_lone_instance_is_believed() -> None:
    """There is no other one that it could be tested with; its agent's checkpoints are used."""
    bench = Bench("b0")

    assert bench.moves() == {"b0"}


def test_a_process_of_the_same_version_is_tested_5_s_after_it_came_up() -> None:
    bench = Bench("p0", "d0")
    bench.run()

    bench.now_s = 100.0
    bench.up("d0", epoch=2)

    assert bench.tests.next_retry_s(bench.now_s) == 105.0


# Restores from rows that agents serve.


class Rows(Bench):
    """Rows of these instances are alike, and agents serve them."""

    def __init__(self, *names: str) -> None:
        self.served = {*names}
        super().__init__(*names, loads_rows_of=self._loads_rows_of)

    def _loads_rows_of(self, target: Member, holder: Member) -> bool:
        return {target.id, holder.id} <= self.served

    def news(self, name: str) -> SelfTested:
        found = self.tests.news([InstanceId(name)])
        return next(each for each in found if each.instance == name)


def test_each_decode_instance_is_to_restore_rows_of_another_instance() -> None:
    """Once its own tokens are known, with which those behind loaded rows are compared."""
    bench = Rows("p0", "d0", "d1")

    done = bench.run()

    assert [each[1:] for each in done if each[0] == "agent of"] == [("p0", "d0"), ("p0", "d1")]
    assert done.index(("d0",)) < done.index(("agent of", "p0", "d0"))
    assert bench.described("d0")["restores"] is True
    assert bench.described("p0")["restores"] is None


def test_what_fails_to_restore_is_withdrawn_with_the_reason_and_tried_again() -> None:
    """With rows of another instance, since the fault may be that one's or a passing one."""
    bench = Rows("p0", "d0", "d1")
    bench.computing = {"d0"}
    bench.run()

    shown = bench.described("d0")
    assert (shown["restores"], shown["cause"], shown["done"]) == (False, "loaded none", True)
    assert bench.news("d0").restores is False
    assert bench.moves() == {"p0", "d0", "d1"}

    bench.wait()
    assert bench.run() == [("agent of", "d1", "d0")]
    bench.computing = set()
    bench.wait()
    assert bench.run() == [("agent of", "p0", "d0")]
    shown = bench.described("d0")
    assert (shown["restores"], shown["cause"]) == (True, "")


def restarted() -> Rows:
    """d0 has restored, and is up again as another process."""
    bench = Rows("p0", "d0", "d1")
    bench.run()
    bench.lose("d0")
    bench.up("d0", epoch=2)
    return bench


def test_what_restored_before_is_withdrawn_when_it_fails_a_second_time() -> None:
    """It is tested behind a death: rows may come late then, and this may be the one instance that
    streams can be restored at.
    """
    bench = restarted()
    bench.computing = {"d0"}

    bench.wait()
    assert ("agent of", "p0", "d0") in bench.run()
    shown = bench.described("d0")
    assert (shown["restores"], shown["cause"], shown["done"]) == (True, "loaded none", False)
    assert bench.news("d0").restores is True

    bench.wait()
    assert bench.run() == [("agent of", "d1", "d0")]
    shown = bench.described("d0")
    assert (shown["restores"], shown["done"]) == (False, True)


def test_what_goes_on_with_other_tokens_is_withdrawn_at_once() -> None:
    bench = restarted()
    bench.wrong = {"d0"}

    bench.wait()
    bench.run()

    shown = bench.described("d0")
    assert (shown["restores"], shown["cause"]) == (False, "wrong")


def test_a_process_of_the_same_version_inherits_what_was_seen_of_restores() -> None:
    bench = Rows("p0", "d0", "d1")
    bench.computing = {"d0"}
    bench.run()

    bench.lose("d0")
    bench.up("d0", epoch=2)
    inherited = bench.described("d0")["restores"]
    bench.lose("d0")
    bench.up("d0", epoch=3, fingerprint="g")

    assert (inherited, bench.described("d0")["restores"]) == (False, None)


@pytest.mark.parametrize("lacks", ["d0", "d1"])
def test_what_cannot_be_tested_is_believed_and_tested_once_it_can(lacks: str) -> None:
    bench = Rows("d0", "d1")
    bench.served = {"d0", "d1"} - {lacks}
    assert ("agent of", "d1", "d0") not in bench.run()
    assert bench.described("d0")["restores"] is None
    assert bench.described("d0")["done"]

    bench.served = {"d0", "d1"}

    assert not bench.described("d0")["done"]
    assert ("agent of", "d1", "d0") in bench.run()


def test_a_server_that_restores_nothing_keeps_no_other_from_its_test() -> None:
    """It is tested five times, and is blamed alone; another holder is as good as before."""
    bench = Rows("d0", "d1")
    bench.computing = {"d0"}
    for _ in range(20):
        bench.run()
        bench.wait()

    found = {name: bench.described(name) for name in ("d0", "d1")}
    assert {name: (each["restores"], each["failures"]) for name, each in found.items()} == {
        "d0": (False, 5),
        "d1": (True, 0),
    }


def test_rows_that_cannot_be_loaded_say_nothing_of_hand_offs() -> None:
    """A prefill instance that comes up later still finds a partner."""
    bench = Rows("p0", "d0", "d1")
    bench.computing = {"d0", "d1"}
    for _ in range(20):
        bench.run()
        bench.wait()

    bench.up("p0", epoch=2, fingerprint="g")
    bench.run()

    assert bench.moves() == {"p0", "d0", "d1"}


def test_other_rows_are_tested_again() -> None:
    """The way to them may have been closed, or their agent may have been wrong."""
    bench = Rows("d0", "d1")
    bench.computing = {"d0", "d1"}
    for _ in range(20):
        bench.run()
        bench.wait()
    assert bench.run() == []

    bench.computing = set()
    bench.tests.rows_changed()
    bench.run()

    assert [bench.described(name)["restores"] for name in ("d0", "d1")] == [True, True]


def test_an_instance_that_ends_in_two_tests_of_rows_is_not_restored_at() -> None:
    """However often it generates tokens in between."""
    bench = Rows("d0", "d1")
    for epoch in (2, 3):
        target, test = "", bench.tests.next(bench.now_s)
        while target != "d0":
            match test:
                case None:
                    bench.wait()
                case RestoreTest(target=target):
                    if target != "d0":
                        bench.tests.restored(test, "", bench.now_s)
                case TokensTest():
                    bench.tests.generated(test, EXACT)
                case _:
                    raise AssertionError(test)
            if target != "d0":
                test = bench.tests.next(bench.now_s)
        assert isinstance(test, RestoreTest)
        bench.lose("d0")
        bench.up("d0", epoch=epoch)
        bench.tests.put_off(test, "it was ended", bench.now_s)

    bench.run()
    shown = bench.described("d0")
    assert (shown["restores"], shown["cause"]) == (
        False,
        "the instance has ended in its tests of rows",
    )
    assert bench.described("d1")["restores"] is True


def test_a_test_of_rows_that_shows_nothing_is_carried_out_later() -> None:
    bench = Rows("d0", "d1")
    test = bench.next_restore()

    bench.tests.put_off(test, "not counted yet", bench.now_s)

    shown = bench.described(test.target)
    assert (shown["restores"], shown["cause"], shown["failures"]) == (None, "not counted yet", 0)
    bench.run()
    bench.wait()
    assert ("agent of", test.holder, test.target) in bench.run()
    assert bench.described(test.target)["restores"] is True


def test_an_error_in_a_test_of_rows_is_a_failure_of_its_target_alone() -> None:
    """A server that answers a load with an error would end recovered streams in the same way."""
    bench = Rows("d0", "d1")
    test = bench.next_restore()

    bench.tests.failed(test, "sent an error event", bench.now_s)

    shown = bench.described(test.target)
    assert (shown["restores"], shown["cause"]) == (False, "sent an error event")
    assert bench.described(test.holder)["failures"] == 0


@pytest.mark.parametrize(("greedy", "weights"), [((1, 2, 3), "right"), ((1, 2, 4), "other")])
def test_the_first_tokens_of_a_test_show_the_weights(greedy: tuple[int, ...], weights: str) -> None:
    """New streams need not wait for its end; what is cut does, since nothing is known of cuts."""
    bench = Bench("d0", "d1", "d2", tests_kv=False)
    bench.run()
    bench.up("d0", epoch=2, fingerprint="", engine="0.33")
    test = bench.next()
    assert isinstance(test, TokensTest)

    before = bench.tests.standing(InstanceId("d0"))
    bench.tests.glimpsed(test, Generated(greedy, (), Continues.GREEDY))

    assert (before, bench.tests.standing(InstanceId("d0"))) == ("untested", weights)
    assert bench.tests.continues(InstanceId("d0")) is None


@pytest.mark.parametrize(("made", "weights"), [(EXACT, "right"), (OTHER, "other")])
def test_a_prefill_instance_that_generates_shows_its_weights(made: Generated, weights: str) -> None:
    """It has no vote, and is doubted until then beside decode instances that are tested."""
    bench = Bench("p0", "d0", "d1", tests_kv=False, prefill_generates=True)
    bench.generates["p0"] = made
    bench.run()
    bench.up("p0", epoch=2, fingerprint="", engine="0.32")

    before = bench.tests.standing(InstanceId("p0")), bench.described("p0")["done"]
    bench.run()

    assert before == ("untested", False)
    assert bench.tests.standing(InstanceId("p0")) == weights
    assert bench.described("p0")["done"]
    assert {*bench.tests.comparison.votes} == {"d0", "d1"}
    assert bench.run() == []


def test_a_prefill_instance_that_generates_nothing_is_not_doubted() -> None:
    """Servers that only compute prompts may refuse anything else."""
    bench = Bench("p0", "d0", "d1", tests_kv=False, prefill_generates=True)
    bench.up("p0", epoch=2, fingerprint="", engine="0.32")
    while (test := bench.tests.next(bench.now_s)) is not None:
        if test.names == ("p0",):
            bench.tests.failed(test, "501", bench.now_s)
        else:
            assert isinstance(test, TokensTest)
            bench.tests.generated(test, EXACT)

    assert bench.tests.standing(InstanceId("p0")) == "not compared"


def test_a_prefill_instance_that_generates_nothing_is_still_tested_for_kv() -> None:
    """Before it is asked again, and it is not doubted again behind that test."""
    bench = Bench("p0", "d0", "d1", prefill_generates=True)
    bench.up("p0", epoch=2, fingerprint="", engine="0.32")
    standings = set[str]()
    for _ in range(20):
        while (test := bench.tests.next(bench.now_s)) is not None:
            match test:
                case TransferTest():
                    bench.tests.transferred(test, moved=True)
                case TokensTest(instance="p0"):
                    bench.tests.failed(test, "501", bench.now_s)
                case TokensTest():
                    bench.tests.generated(test, EXACT)
                case _:
                    raise AssertionError(test)
            if bench.described("p0")["cause"] or standings:
                standings.add(bench.tests.standing(InstanceId("p0")))
        bench.wait()

    assert bench.moves() == {"p0", "d0", "d1"}
    assert standings == {"not compared"}
    assert bench.described("p0")["done"]


def test_an_instance_with_other_weights_takes_no_promise_from_the_others() -> None:
    """However it continues what is cut: no exact stream goes there."""
    bench = Bench("d0", "d1", "d2", tests_kv=False)
    bench.generates["d2"] = Generated((1, 2, 4), (4, 5, 6), Continues.TEXT)
    bench.run()

    assert bench.tests.standing(InstanceId("d2")) == "other"
    assert bench.tests.least == (None, Continues.SEEDED)
