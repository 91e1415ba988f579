"""Schedule and results of the instances' resume self-tests.

Each process of an instance is tested once. Until then the results of the former process of the same
version apply, and the test waits for the streams that the former process left. Without a former
process no KV is fetched to or from the instance, but its declared abilities to continue streams
exactly and to restore rows are believed. The driver sends the requests of the tests.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from kvrs.core.fleet.comparison import Comparison, compare
from kvrs.core.fleet.generated import Continues, Generated, Likeness
from kvrs.core.fleet.stores import Stores
from kvrs.core.fleet.tested import (
    RestoreTest,
    Seen,
    SelfTest,
    TestedProcess,
    TokensTest,
    TransferTest,
    names_of,
)
from kvrs.core.model import events as ev
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Capability, InstanceInfo, Role

_MAX_FAILURES = 5
_OF_KV = frozenset(
    (Capability.PULL_PAGES, Capability.RETAIN, Capability.SPLIT, Capability.PREFIX_CACHE)
)
_LATER_S = 5.0  # Delay of the test of a process after one of the same version.
# Longest pause between tests of an empty store, which may be started later.
_LONGEST_PAUSE_S = 600.0
_MAX_LOSSES = 2  # Deaths of an instance in its tests after which it is not tested again.


class SelfTests:
    """The self-tests of one proxy. Without `tests_kv`, engines cannot be asked about moved KV, and
    are believed to move it. Rows of vLLM's own memory, which agents serve, take another way than KV
    between instances, and are tested separately.
    """

    def __init__(
        self,
        known: Mapping[InstanceId, Member],
        *,
        enabled: bool,
        tests_kv: bool,
        loads_rows_of: Callable[[Member, Member], bool] = lambda target, holder: False,
    ) -> None:
        self._known = known
        self._enabled = enabled
        self._may_test_kv = tests_kv
        self._loads_rows = lambda target, holder: loads_rows_of(known[target], known[holder])
        self.stores = Stores(known, enabled=enabled)
        self._lives: dict[InstanceId, TestedProcess] = {}
        # Read-only view of each instance's present or last process.
        self.processes: Mapping[InstanceId, TestedProcess] = self._lives
        # Consecutive deaths of an instance in its tests; tests of rows count separately.
        self._losses: dict[InstanceId, int] = {}
        self._restore_losses: dict[InstanceId, int] = {}
        self._running: dict[SelfTest, list[TestedProcess]] = {}
        # Last reported tokens, weights and store of each instance (`news`).
        self._reported: dict[InstanceId, tuple[str, str, ev.StoreSeen | None]] = {}
        self.comparison = Comparison()
        # The decode instance that continues streams least exactly, by its test or else by its
        # declaration; None: all continue exactly.
        self.least: tuple[InstanceId | None, Continues] = None, Continues.SEEDED
        self.changed: Callable[[], None] = lambda: None  # Called when a test may have become due.

    @property
    def _tests_kv(self) -> bool:
        """KV is tested only if the configuration has two instances that could exchange it."""
        if not self._may_test_kv:
            return False
        # Evaluated at each report, so the search stops at the first pair of roles.
        roles: list[Role] = []
        for one in self._known.values():
            if one.health is Health.REMOVED:
                continue
            if any(_can_exchange(one.role, o) or _can_exchange(o, one.role) for o in roles):
                return True
            if one.role not in roles:
                roles.append(one.role)
        return False

    # Life of an instance.

    def up(self, info: InstanceInfo, now_s: float) -> None:
        """Note a new process of the instance, or changed abilities of the same process."""
        life = self._lives.get(info.id)
        if life is not None and _process(life.info) == _process(info):
            life.info = info
        else:
            self._begin(info, life, now_s)
        self._compare()
        self.changed()

    def _begin(self, info: InstanceInfo, before: TestedProcess | None, now_s: float) -> None:
        is_alike = before is not None and _version(before.info) == _version(info)
        if not is_alike:
            self._losses.pop(info.id, None)
            self._restore_losses.pop(info.id, None)
        former = before.seen if before is not None and is_alike else None
        later_s = 0.0 if former in (None, Seen()) else now_s + _LATER_S
        self._lives[info.id] = life = TestedProcess(info, former=former, retry_at_s=later_s)
        self.stores.begin(info.id)
        if self._restore_losses.get(info.id, 0) >= _MAX_LOSSES:
            life.restores, life.ends_in_tests = False, True
            life.restore_fault = "the instance has ended in its tests of rows"
        for other in self._lives.values():
            other.partners.discard(info.id)

    def lost(self, instance: InstanceId) -> None:
        life = self._lives.get(instance)
        if life is None or not life.is_busy:
            return
        losses = self._losses
        for test, lives in self._running.items():
            if isinstance(test, RestoreTest) and life in lives:
                losses = self._restore_losses
        losses[instance] = losses.get(instance, 0) + 1

    def rows_changed(self) -> None:
        """Repeat failed tests of rows: agents now serve other rows."""
        for life in self._lives.values():
            life.restore_failures, life.restore_at_s = 0, 0.0
        self.changed()

    def forget(self, instance: InstanceId) -> None:
        """Forget an instance that was removed from the cluster."""
        self._lives.pop(instance, None)
        self.stores.forget(instance)
        self._reported.pop(instance, None)
        self._compare()
        self._losses.pop(instance, None)
        self._restore_losses.pop(instance, None)

    # Results.

    def seen(self, instance: InstanceId) -> Seen:
        """Results of an instance's tests, in the form that the policy gets."""
        life = self._lives.get(instance)
        if not self._enabled or life is None:
            return Seen(moves_kv=not self._enabled)
        seen = life.seen if self._tests_kv else replace(life.seen, moves_kv=True)
        store = None if self._known[instance].has_tier else self.stores.of(instance)
        if store is not None:
            seen = replace(seen, restores=store.restores, store=store)
        return seen

    def continues(self, instance: InstanceId) -> Continues | None:
        """Exactness of the instance's continuations; None: not tested yet."""
        generated = self.seen(instance).generated
        return None if generated is None else generated.continues

    def _compare(self) -> None:
        """Compare the tested instances' outputs."""
        self.least = _least(self._known, self._lives, self.continues)
        seen = {name: life.seen.generated for name, life in self._lives.items()}
        self.comparison = compare({name: each for name, each in seen.items() if each is not None})

    def news(self, instances: Container[InstanceId]) -> list[ev.SelfTested]:
        """Events for the policy: about these instances, if tested, and about others whose results
        have changed.
        """
        found = list[ev.SelfTested]()
        for name, life in self._lives.items():
            seen = self.seen(name)
            told = seen.tokens, self.comparison.weights.get(name, ""), seen.store
            is_new = name in instances or self._reported.get(name, told) != told
            if is_new and self._known[name].health is Health.UP:
                self._reported[name] = told
                epoch, (tokens, weights, store) = life.info.epoch, told
                facts = seen.moves_kv, tokens, seen.restores, weights, store
                found.append(ev.SelfTested(name, epoch, *facts))
        return found

    def goes_on(
        self,
        began: TestedProcess | None,
        target: InstanceId,
        *,
        sampled: bool,
        replays: bool = False,
    ) -> bool:
        """`target` continues the output of `began` exactly, as far as is known. Replay of a sampled
        output restores the target's random number generator.
        """
        before = None if began is None else began.seen.generated
        after = self.seen(target).generated
        if after is None:
            return True
        if after.continues in (Continues.TEXT, Continues.NONE):
            return False
        if sampled and not replays and after.continues is not Continues.SEEDED:
            return False
        if before is None:
            return True
        return before.seeded == after.seeded if sampled else before.greedy == after.greedy

    def describe(self, instance: InstanceId) -> dict[str, Any] | None:
        """Plain data for the state; None: the instance has not been up."""
        life = self._lives.get(instance)
        if life is None or not self._enabled:
            return None
        continues = self.continues(instance)
        others, near = self.different(instance)
        store = self.stores.describe(instance)
        return {
            "done": not life.is_busy and self._is_done(life),
            "continues": None if continues is None else continues.value,
            "drafts": _drafts(self.seen(instance).generated),
            "moves_kv": self.seen(instance).moves_kv if self._tests_kv else None,
            "restores": life.seen.restores if store is None else store["restores"],
            "store": store,
            "capabilities": _capabilities(life.info, self.seen(instance)),
            "differs_from": others,
            "near_ties_with": near,
            "failures": life.failures + life.restore_failures,
            "cause": life.cause or life.restore_fault,
        }

    def different(self, instance: InstanceId) -> tuple[list[InstanceId], list[InstanceId]]:
        """Instances with other tokens than this instance, and instances that differ only by
        near-ties.
        """
        mine = self.seen(instance).generated
        found = list[InstanceId](), list[InstanceId]()
        for other in sorted(self._lives):
            theirs = self.seen(other).generated
            if mine is None or theirs is None or mine.name == theirs.name:
                continue
            found[mine.likeness(theirs) is not Likeness.OTHER].append(other)
        return found

    # Tests, at most one at a time per instance.

    def next(self, now_s: float) -> SelfTest | None:
        """The next test to run; its instances stay busy until the test's result or failure is
        reported.
        """
        if not self._enabled:
            return None
        free = {
            life.info.id: life
            for life in self._lives.values()
            if not life.is_busy and life.retry_at_s <= now_s and self._may_be_tested(life)
        }
        for life in free.values():
            if life.generated is None and _decodes(life.info.role):
                return self._take(TokensTest(life.info.id))
        for life in free.values():
            if self._tests_kv and life.moves_kv is None and (test := _pair(life, free)) is not None:
                return self._take(test)
        # Instances with the fewest failures go first: a test occupies its holder.
        holders = _free(self._lives, self._known)
        for life in sorted(free.values(), key=lambda life: life.restore_failures):
            is_due = life.restore_at_s <= now_s
            if (
                is_due
                and (restore := _restore(life, holders, self._loads_rows, self.stores)) is not None
            ):
                return self._take(restore)
        return None

    def next_retry_s(self, now_s: float) -> float | None:
        """Time when a waiting instance may be tested; None: no instance waits."""
        waiting = (
            at_s
            for life in self._lives.values()
            for at_s in (life.retry_at_s, life.restore_at_s)
            if at_s > now_s and self._may_be_tested(life)
        )
        return min(waiting, default=None)

    def generated(self, test: TokensTest, found: Generated) -> None:
        for life in self._end(test):
            life.generated, life.failures, life.retry_at_s, life.cause = found, 0, 0.0, ""
            self._losses.pop(test.instance, None)
        self._compare()

    def transferred(self, test: TransferTest, *, moved: bool | None) -> None:
        """Note the result of a transfer. `moved`: None if the engine does not count received KV,
        and is believed.

        If nothing moved between two instances, the fault is with the one whose partner has moved KV
        with a third.
        """
        pair = self._end(test)
        for life, other in zip(pair, reversed(pair), strict=True):
            life.failures, life.retry_at_s = 0, 0.0
            if moved is not False:
                continue
            life.partners.add(other.info.id)
            if not life.moves_kv:
                life.cause = f"no KV moved from {test.holder} to {test.target}"
                life.former = replace(life.former or Seen(), moves_kv=False)
        for life, other in zip(pair, reversed(pair), strict=True):
            if moved is not False:
                life.moves_kv, life.cause = True, ""
            elif life.moves_kv is None and other.moves_kv:
                life.moves_kv = False

    def restored(
        self,
        test: RestoreTest,
        fault: str,
        now_s: float,
        *,
        is_wrong: bool = False,
        is_over: bool = True,
    ) -> None:
        """Note the result of a restore. `fault`: why the target does not restore; empty: it does.
        `is_over`: the test was carried out; otherwise it has shown nothing about a store.

        After a fault the test is repeated, with pauses that double, because the cause may pass. A
        target whose former process restored still counts as restoring until it has failed twice, or
        continued with other tokens (`is_wrong`): its test follows a death, when rows come late and
        streams have nowhere else to go. A store is believed only after a passed test in the present
        process.
        """
        for life in self._end(test):
            if life.info.id == test.target:
                is_first = bool(fault) and not is_wrong and not life.restore_fault
                believed = is_first and not test.in_store and (life.former or Seen()).restores
                # A store's test says nothing about rows that agents may serve later.
                is_open = believed or (test.in_store and not fault)
                life.restores, life.restore_fault = None if is_open else not fault, fault
                life.put_offs = 0
                life.restore_failures = life.restore_failures + 1 if fault else 0
                pause_s = min(_LONGEST_PAUSE_S, 2.0 ** min(life.restore_failures, 16))
                life.restore_at_s = now_s + pause_s if fault else 0.0
                if test.in_store and not fault:
                    self.stores.passed(test.target, test.holder)
                elif test.in_store:
                    self.stores.failed(test.target, is_wrong=is_wrong if is_over else None)
                if not fault:
                    self._restore_losses.pop(test.target, None)

    def put_off(self, test: RestoreTest, cause: str, now_s: float) -> None:
        """Repeat a test that has shown nothing, without counting a failure, after pauses that
        double.
        """
        for life in self._end(test):
            if life.info.id == test.target:
                pause_s = min(_LONGEST_PAUSE_S, _LATER_S * 2.0 ** min(life.put_offs, 16))
                life.put_offs += 1
                life.restore_fault, life.restore_at_s = cause, now_s + pause_s

    def failed(self, test: SelfTest, cause: str, now_s: float) -> None:
        """Repeat a test that could not be carried out, after pauses that double. An error in a test
        of rows is the target's fault: recoveries would fail likewise.
        """
        if isinstance(test, RestoreTest):
            self.restored(test, cause, now_s, is_over=False)
            return
        for life in self._end(test):
            life.failures += 1
            life.retry_at_s = now_s + 2.0**life.failures
            life.cause = cause

    def _take(self, test: SelfTest) -> SelfTest:
        self._running[test] = lives = [self._lives[name] for name in names_of(test)]
        for life in lives:
            life.is_busy = True
        return test

    def _end(self, test: SelfTest) -> list[TestedProcess]:
        """End a test and return its processes; empty if a process is gone."""
        lives = self._running.pop(test)
        for life in lives:
            life.is_busy = False
        return lives if all(self._lives.get(life.info.id) is life for life in lives) else []

    def _may_be_tested(self, life: TestedProcess) -> bool:
        return (
            self._known[life.info.id].health is Health.UP
            and life.failures < _MAX_FAILURES
            and self._losses.get(life.info.id, 0) < _MAX_LOSSES
        )

    def _is_done(self, life: TestedProcess) -> bool:
        """No test is left with the instances that are up."""
        if not self._may_be_tested(life):
            return True
        if life.generated is None and _decodes(life.info.role):
            return False
        others = {each.info.id: each for each in self._lives.values() if self._may_be_tested(each)}
        if self._tests_kv and life.moves_kv is None and _pair(life, others) is not None:
            return False
        restore = _restore(life, others, self._loads_rows, self.stores)
        return life.restores is not None or restore is None


def _least(
    known: Iterable[InstanceId],
    lives: Mapping[InstanceId, TestedProcess],
    continues: Callable[[InstanceId], Continues | None],
) -> tuple[InstanceId | None, Continues]:
    least: tuple[InstanceId | None, Continues] = None, Continues.SEEDED
    for name in known:
        life = lives.get(name)
        if life is None or not _decodes(life.info.role):
            continue
        is_exact = Capability.EXACT_RESUME in life.info.capabilities
        declared = Continues.SEEDED if is_exact else Continues.GREEDY
        found = continues(name) or declared
        if found.is_below(least[1]):
            least = name, found
    return least


def _capabilities(info: InstanceInfo, seen: Seen) -> list[str]:
    """Capabilities that the instance declares, without those that its tests have refuted, and how
    it continues a stream.
    """
    unseen = set() if seen.moves_kv else {*_OF_KV}
    names = [each.value for each in info.capabilities if each not in unseen]
    return names if seen.generated is None else [*names, seen.generated.continues.value]


def _free(
    lives: Mapping[InstanceId, TestedProcess], known: Mapping[InstanceId, Member]
) -> list[InstanceId]:
    """Instances whose rows may be loaded now."""
    return [
        name for name, life in lives.items() if not life.is_busy and known[name].health is Health.UP
    ]


def _drafts(generated: Generated | None) -> dict[str, Any] | None:
    """Plain data; `steps` are the steps that verified the proposed drafts."""
    if generated is None or (drafts := generated.drafts) is None:
        return None
    return {"steps": drafts.steps, "proposed": drafts.proposed, "accepted": drafts.accepted}


def _process(info: InstanceInfo) -> tuple[object, ...]:
    # The epoch, which rises with every process, identifies a process without a pid (0).
    return (info.pid or info.epoch, tuple(info.worker_pids), info.model, info.fingerprint)


def _version(info: InstanceInfo) -> tuple[object, ...]:
    return info.model, info.fingerprint, tuple(info.capabilities)


def _pair(life: TestedProcess, free: Mapping[InstanceId, TestedProcess]) -> TransferTest | None:
    """A transfer test with another instance, preferably one that has moved KV."""
    first: TransferTest | None = None
    for other in free.values():
        if other is life or other.info.id in life.partners or other.moves_kv is False:
            continue
        for holder, target in ((life.info, other.info), (other.info, life.info)):
            if _can_exchange(holder.role, target.role):
                test = TransferTest(holder.id, target.id)
                if other.moves_kv:
                    return test
                first = first or test
    return first


def _restore(
    life: TestedProcess,
    others: Iterable[InstanceId],
    loads_rows_of: Callable[[InstanceId, InstanceId], bool],
    stores: Stores,
) -> RestoreTest | None:
    """A restore test of the instance; each failure moves on to another holder, which may be at
    fault.
    """
    target, failures = life.info.id, life.restore_failures
    if life.generated is None or life.ends_in_tests:
        return None
    names = [name for name in others if name != target]
    holders, in_store = list[InstanceId](), False
    if not life.restores and failures < _MAX_FAILURES:
        holders = [name for name in names if loads_rows_of(target, name)]
    if not holders and not stores.is_settled(target):
        holders, in_store = [name for name in names if stores.may_share(target, name)], True
    return RestoreTest(holders[failures % len(holders)], target, in_store) if holders else None


def _can_exchange(holder: Role, target: Role) -> bool:
    return holder is not Role.DECODE and _decodes(target)


def _decodes(role: Role) -> bool:
    return role is not Role.PREFILL
