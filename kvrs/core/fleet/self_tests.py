"""Self-tests of the instances: their schedule, results, and what these show of weights and stores.

Each process of an instance is tested once. Until then no KV is fetched to or from it, and its
declared abilities are believed, if nothing is known of any instance. The results of the former
process apply only if both are known to have the same weights, by their digest, and the same
version; then the test waits for the streams that the former process left. The driver sends the
requests of the tests.

Nothing but a digest tells weights apart for sure. An agent reports that of the engines whose rows
it serves, and an engine of kvrs its own. Else the tokens count that an instance computes from the
known prompt (its self-test).

| an instance's process | its `Standing` | new streams |
| --------------------- | -------------- | ----------- |
| has shown nothing, and no weights are known to be right | NOT_COMPARED | go there |
| has shown the weights that count as right | RIGHT | go there |
| has shown nothing, or none has shown those that are known to be right | UNTESTED | as with OTHER |
| has shown others | OTHER | go there if nothing else serves, marked |

Each instance has one vote: for what its present process has shown, or else its last one. Deaths of
right instances so do not make a wrong one right. The weights with most votes are right; of two with
equally many those that were right before; and before any were, those that more than half of the
configured instances have. An operator's choice stands above votes (`RightWeights`).

A store of KV that engines share on their own (LMCache, Mooncake) is trusted only after a self-test,
which each process of an instance must pass, because faults of stores appear at restarts. If
recoveries find nothing any more, the store may have been restarted, and the test is due again.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import Any

import msgspec

from kvrs.core.fleet.tested import (
    Continues,
    Generated,
    Likeness,
    RestoreTest,
    Seen,
    SelfTest,
    TokensTest,
    TransferTest,
)
from kvrs.core.model import events as ev
from kvrs.core.model.events import StoreSeen
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Capability, FetchReport, InstanceInfo, Role
from kvrs.protocol.rows import RegionReport

# Weight (of 1) of the newest share in the mean: large, because a store loses everything at once.
_WEIGHT = 0.5
_LOST = 0.2  # A store with less of the requested KV may be a new, empty one, and is tested again.
# Share that a store counts with after a passed test, if recoveries found less before.
_TESTED_SHARE = 0.5
# Smaller changes of a share change no decision.
_STEP = 0.05
# Loads of fewer tokens do not change a share: some stores keep pieces of this size, and nothing
# smaller.
_LEAST_ASKED_TOKENS = 256
_OTHER = "other"


class Stores:
    """State of the stores of all instances."""

    def __init__(self, known: Mapping[InstanceId, Member], *, enabled: bool) -> None:
        self._known = known
        self._enabled = enabled
        self._spaces: dict[InstanceId, str] = {}
        # Share of the requested KV that recoveries found, for each instance that passed the test.
        self._passed: dict[InstanceId, float] = {}
        # Failed tests: whether tokens were wrong; None: the test was not carried out.
        self._failed: dict[InstanceId, bool | None] = {}
        self._shares: dict[InstanceId, float] = {}
        self._counted: dict[InstanceId, frozenset[FetchReport]] = {}
        # Kind of each instance's last store: the next process is not trusted before it reports.
        self._kinds: dict[InstanceId, str] = {}

    def begin(self, instance: InstanceId) -> None:
        """Forget the results of an instance's former process."""
        for book in (self._spaces, self._passed, self._failed, self._shares, self._counted):
            book.pop(instance, None)

    def forget(self, instance: InstanceId) -> None:
        """Forget an instance that was removed from the cluster."""
        self.begin(instance)
        self._kinds.pop(instance, None)

    def may_share(self, target: InstanceId, holder: InstanceId) -> bool:
        """Return whether both instances load KV of one model from stores of one kind, by their
        reports.
        """
        one, other = self._known[target], self._known[holder]
        if not one.store or one.store != other.store or not (one.was_up and other.was_up):
            return False
        return one.info.model == other.info.model

    def is_settled(self, instance: InstanceId) -> bool:
        """Return whether no test is left for this process: it passed, or continued with wrong
        tokens.
        """
        return instance in self._passed or self._failed.get(instance) is True

    def passed(self, target: InstanceId, holder: InstanceId) -> None:
        """Note that the target continued correctly from the holder's stored KV."""
        # Another process of the holder may have other weights under the same name.
        own = f"store of {holder} {self._known[holder].epoch}"
        space, former = self._spaces.get(holder, own), self._spaces.get(target)
        alike = [each for each, its in self._spaces.items() if its == former]
        if not self._failed.get(holder):
            alike.append(holder)
        self._spaces |= dict.fromkeys([*alike, target], space)
        self._failed.pop(target, None)
        self._passed[target] = max(_TESTED_SHARE, self._shares.get(target, 1.0))

    def failed(self, target: InstanceId, *, is_wrong: bool | None) -> None:
        """Note a failed test. `is_wrong`: the target continued with wrong tokens; None: not
        observed.
        """
        self._failed[target] = is_wrong
        self._passed.pop(target, None)
        if is_wrong:
            self._spaces.pop(target, None)

    def of(self, instance: InstanceId) -> StoreSeen | None:
        """The instance's store for the policy; None: no tested store."""
        space = self._spaces.get(instance)
        if space is None:
            return None
        share = self._passed.get(instance)
        return StoreSeen(space, share is not None, share or 0.0)

    def describe(self, instance: InstanceId) -> dict[str, Any] | None:
        """Plain data for the state; None: the instance reports no store."""
        kind = self._known[instance].store
        is_passed = instance in self._passed
        if not kind:
            return None
        return {
            "kind": kind,
            "restores": True if is_passed else False if instance in self._failed else None,
            "share": self._passed.get(instance, self._shares.get(instance)),
            "is_wrong": bool(self._failed.get(instance)),
            "with": sorted(
                each
                for each, space in self._spaces.items()
                if each != instance and space == self._spaces.get(instance)
            ),
        }

    def distrusts(self, instance: InstanceId) -> bool:
        """Return whether a recovery at the instance must not find anything in its store: the
        instance loads from it on its own, and it is untested or was wrong. A store that had nothing
        of another instance may hold what the instance itself has stored.
        """
        known = self._known[instance]
        kind = known.store or ("" if known.shared.has_tier else self._kinds.get(instance, ""))
        if not self._enabled or not kind or instance in self._passed:
            return False
        return self._failed.get(instance) is not False

    def fetched(self, instance: InstanceId, fetches: Iterable[FetchReport]) -> bool:
        """Update the share by the loads of recoveries, of which each is reported several times.
        Return whether the policy's view has changed.
        """
        kind = self._known[instance].store
        # An empty report does not replace `_OTHER`, a store of unknown kind that showed by a load.
        if kind or self._kinds.get(instance) != _OTHER:
            self._kinds[instance] = kind
        before, now = self._counted.get(instance, frozenset()), frozenset(fetches)
        self._counted[instance] = now
        if instance not in self._passed:
            return False
        told = share = self._passed[instance]
        page = self._known[instance].abilities.page_size_tokens
        for each in now - before:
            asked = (each.loaded_tokens + each.computed_tokens - 1) // page * page
            if asked >= _LEAST_ASKED_TOKENS:
                share += _WEIGHT * (min(1.0, each.loaded_tokens / asked) - share)
        if share < _LOST:
            self._shares[instance] = share
            del self._passed[instance]
        elif abs(share - told) > _STEP:
            self._passed[instance] = share
        return self._passed.get(instance) != told


class Standing(StrEnum):
    """Relation of an instance's present process to the weights that count as right."""

    NOT_COMPARED = "not compared"
    RIGHT = "right"
    UNTESTED = "untested"
    OTHER = "other"

    @property
    def is_doubted(self) -> bool:
        return self in (Standing.UNTESTED, Standing.OTHER)


class Vote(msgspec.Struct, frozen=True):
    """The known facts of the weights of one process."""

    generated: Generated | None = None
    digest: str = ""  # Empty: not known.
    version: str = ""  # Version of a stock engine.

    @property
    def marks(self) -> frozenset[str]:
        """Names by which proxies tell each other these weights."""
        found = {f"weights {self.digest}"} if self.digest else set()
        if self.generated is not None:
            found.add(f"tokens {self.generated.generates}")
        return frozenset(found)

    def likeness(self, other: "Vote") -> Likeness | None:
        """Compare the weights of two processes; None: nothing is known of both. Two versions of an
        engine may answer differently with equal weights, which only a digest shows.
        """
        if self.digest and other.digest:
            if self.digest != other.digest:
                return Likeness.OTHER
            if self.version != other.version or None in (self.generated, other.generated):
                return Likeness.ALIKE
        if self.generated is None or other.generated is None:
            return None
        return self.generated.likeness(other.generated)


class RightWeights(msgspec.Struct, frozen=True):
    """The weights that count as right at a proxy, in the form in which proxies exchange them."""

    marks: frozenset[str] = (
        frozenset()
    )  # Marks of the weights (`Vote.marks`); empty: none count as right.
    # Time at which an operator has chosen them, in seconds of the wall clock; 0: by votes.
    ordered_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups of instances with equal weights, and the right one."""

    votes: Mapping[InstanceId, Vote] = field(default_factory=dict)
    # Name of each instance's group: that of its first instance.
    groups: Mapping[InstanceId, InstanceId] = field(default_factory=dict)
    right: InstanceId | None = None  # The group that counts as right; None: none does.
    choice: RightWeights = field(default_factory=RightWeights)
    near_ties: bool = False  # Instances of equal weights differ by near-ties.
    # Instances of equal weights differ by near-ties, or only in sampled streams.
    sampled_ties: bool = False
    differs: bool = False  # Two instances compute different tokens, whatever the cause.

    def has_ties(self, *, sampled: bool) -> bool:
        """Return whether output may differ between instances of equal weights: output of sampled
        streams (`sampled`), or of streams at temperature 0.
        """
        return self.sampled_ties if sampled else self.near_ties

    @property
    def marks(self) -> frozenset[str]:
        """Marks of the right weights."""
        right = (self.votes[name] for name, group in self.groups.items() if group == self.right)
        return frozenset[str]().union(*(vote.marks for vote in right))

    def has_majority(self, configured: int) -> bool:
        """Return whether more than half of the configured instances have the right weights."""
        count = sum(group == self.right for group in self.groups.values())
        return self.right is not None and 2 * count > configured

    def standing(self, vote: Vote) -> Standing:
        """Judge a process by what it has shown (`vote`)."""
        if self.right is None:
            # Another proxy, or this one before, has known right weights that no instance has shown.
            if vote.marks & self.choice.marks:
                return Standing.RIGHT
            return Standing.UNTESTED if self.choice.marks else Standing.NOT_COMPARED
        right = [self.votes[name] for name, group in self.groups.items() if group == self.right]
        found = {vote.likeness(each) for each in right}
        if found & {Likeness.ALIKE, Likeness.NEAR}:
            return Standing.RIGHT
        return Standing.OTHER if Likeness.OTHER in found else Standing.UNTESTED


def compare(votes: Mapping[InstanceId, Vote], choice: RightWeights, configured: int) -> Comparison:
    """Group the instances by weights, and find the right ones; equal votes are compared once.
    `choice`: what was right before. `configured`: number of instances that may vote.
    """
    firsts: dict[tuple[object, ...], InstanceId] = {}
    for name in sorted(votes):
        firsts.setdefault(_facts(votes[name]), name)
    groups: dict[InstanceId, InstanceId] = {}
    near_ties = sampled_ties = differs = False
    for name in firsts.values():
        mine, alike = votes[name], {name}
        for other in groups:
            theirs = votes[other]
            likeness = mine.likeness(theirs)
            if likeness in (Likeness.ALIKE, Likeness.NEAR):
                alike.add(groups[other])
            if mine.generated is None or theirs.generated is None:
                continue
            one, two = mine.generated, theirs.generated
            differs |= one.likeness(two) is Likeness.OTHER
            if one.likeness(two) is Likeness.OTHER or likeness is Likeness.OTHER:
                continue
            near_ties |= one.likeness(two) is Likeness.NEAR
            is_level = one.seeded == two.seeded or one.continues is not two.continues
            sampled_ties |= near_ties or not is_level
        groups[name] = first = min(alike)
        groups |= {other: first for other, its in groups.items() if its in alike}
    of_each = {name: groups[firsts[_facts(vote)]] for name, vote in votes.items()}
    right = _right(of_each, votes, choice, configured)
    return Comparison(votes, of_each, right, choice, near_ties, sampled_ties, differs)


def _right(
    groups: Mapping[InstanceId, InstanceId],
    votes: Mapping[InstanceId, Vote],
    choice: RightWeights,
    configured: int,
) -> InstanceId | None:
    counts = Counter(groups.values())
    shown = dict[InstanceId, set[str]]()
    for name, group in groups.items():
        shown.setdefault(group, set()).update(votes[name].marks & choice.marks)
    # A digest says more than tokens, which two models may share.
    before = sorted(
        (group for group in shown if shown[group]),
        key=lambda group: (min(each.startswith("tokens") for each in shown[group]), group),
    )
    if choice.ordered_s and before:
        return before[0]
    most = max(counts.values(), default=0)
    leaders = [group for group, count in counts.items() if count == most]
    if len(leaders) == 1 and (before or 2 * most > configured):
        return leaders[0]
    return next((group for group in before if group in leaders), None)


def _facts(vote: Vote) -> tuple[object, ...]:
    made = vote.generated
    tokens = None if made is None else (made.greedy, made.seeded, made.continues, made.model)
    return tokens, vote.digest, vote.version


_MAX_FAILURES = 5
_OF_KV = frozenset(
    (Capability.PULL_PAGES, Capability.RETAIN, Capability.SPLIT, Capability.PREFIX_CACHE)
)
# Pause before a new process is tested if the former one had the same version and has results; also
# the first pause after a test that showed nothing.
_LATER_S = 5.0
# Longest pause between tests, for example of an empty store, which may be started later.
_LONGEST_PAUSE_S = 600.0
_MAX_LOSSES = 2  # Deaths of an instance in its tests after which it is not tested again.


@dataclass(slots=True)
class Tries:
    """Counts of a process's failed tests. A process has two: for its rows and its store, and for
    all other tests.
    """

    failures: int = 0  # Consecutive failures.
    put_offs: int = 0  # Consecutive tests without a result.
    # Consecutive deaths of the instance in its tests, former processes included.
    losses: int = 0
    at_s: float = 0.0  # Earliest time of the next test.
    cause: str = ""

    def fail(self, cause: str, now_s: float) -> None:
        self.failures, self.put_offs = self.failures + 1, 0
        is_left = self.failures >= _MAX_FAILURES  # But for the tests of tokens, which come rarely.
        pause_s = _LONGEST_PAUSE_S if is_left else 2.0**self.failures
        self.cause, self.at_s = cause, now_s + pause_s

    def put_off(self, cause: str, now_s: float) -> None:
        pause_s = min(_LONGEST_PAUSE_S, _LATER_S * 2.0 ** min(self.put_offs, 16))
        self.put_offs += 1
        self.cause, self.at_s = cause, now_s + pause_s

    def succeed(self) -> None:
        self.failures = self.put_offs = self.losses = 0
        self.at_s, self.cause = 0.0, ""


@dataclass(slots=True, eq=False)
class TestedProcess:
    """A process of an instance, and the results of its tests."""

    info: InstanceInfo
    generated: Generated | None = None
    # The uncut greedy tokens of a running test: they show the weights before the test has ended.
    # All that is asked of a process that only prefills.
    glimpse: Generated | None = None
    # True once a process that only prefills has failed to generate these.
    shows_nothing: bool = False
    # The ability to move KV to and from the process; None: not tested, or no KV moved in tests with
    # other instances of unknown ability.
    moves_kv: bool | None = None
    restores: bool | None = None  # The ability to load KV from agents or a store; None: not tested.
    # Instances with which no KV moved in a test.
    partners: set[InstanceId] = field(default_factory=set)
    digest: str = ""  # Digest of the weights; empty: not known.
    # What the former process, or the last one that showed anything, has shown of its weights; the
    # results of the former process; and its digest and version, for which they hold.
    former_vote: Vote = field(default_factory=Vote)
    former_results: Seen = field(default_factory=Seen)
    former_is: tuple[object, ...] = ()
    # A former process of the same version has passed the test of tokens, which kills none then.
    passed_before: bool = False
    test: SelfTest | None = None  # The running test; None: none.
    tries: Tries = field(default_factory=Tries)
    of_rows: Tries = field(default_factory=Tries)

    @property
    def decodes(self) -> bool:
        return _decodes(self.info.role)

    @property
    def lacks_tokens(self) -> bool:
        """Return whether the process decodes and the test of its tokens has no result yet."""
        return self.generated is None and self.decodes

    @property
    def vote(self) -> Vote:
        return Vote(self.generated, self.digest, self.info.engine)

    @property
    def shown(self) -> Vote:
        """`vote`, also by the first tokens of a running test."""
        return Vote(self.generated or self.glimpse, self.digest, self.info.engine)

    @property
    def _is(self) -> tuple[object, ...]:
        return self.digest, *_version(self.info)

    @property
    def former(self) -> Seen:
        """Results of the former process, if they hold for this one, which has equal weights and the
        same version.
        """
        return self.former_results if self.digest and self.former_is == self._is else Seen()

    def follow(self, former: "TestedProcess") -> None:
        """Note what is known of the process that ran before this one."""
        self.former_vote = former.vote if former.vote.marks else former.former_vote
        self.former_results, self.former_is = former.seen, former._is

    @property
    def seen(self) -> Seen:
        former = self.former
        return Seen(
            former.moves_kv if self.moves_kv is None else self.moves_kv,
            self.generated or former.generated,
            former.restores if self.restores is None else self.restores,
        )


class SelfTests:
    """The self-tests of one proxy. Without `tests_kv`, engines cannot be asked about moved KV, and
    are believed to move it. With `prefill_generates`, prefill instances generate tokens if asked,
    which shows their weights. Rows of vLLM's own memory, which agents serve, take another way than
    KV between instances, and are tested separately.
    """

    def __init__(
        self,
        known: Mapping[InstanceId, Member],
        *,
        enabled: bool,
        tests_kv: bool,
        prefill_generates: bool = False,
        loads_rows_of: Callable[[Member, Member], bool] = lambda target, holder: False,
        due: Callable[[], None] = lambda: None,
    ) -> None:
        """`due` is called when a test may have become due."""
        self._known = known
        self._enabled = enabled
        self._may_test_kv = tests_kv
        self._prefill_generates = prefill_generates
        self._loads_rows_of = loads_rows_of
        self._note_due = due
        self.stores = Stores(known, enabled=enabled)
        # The present or last process of each instance; other modules only read it.
        self.processes: dict[InstanceId, TestedProcess] = {}
        # Last event about each instance for the policy (`news`).
        self._reported: dict[InstanceId, ev.SelfTested] = {}
        # Digests of weights by agents' reports, also of engines that have ended.
        self._digests: dict[InstanceId, str] = {}
        self.comparison = Comparison()
        self.choice = RightWeights()  # The weights that count as right.
        # Instance whose present process an operator has chosen, and that has shown nothing yet; and
        # the epoch of that process and the time of the order.
        self._chosen: tuple[InstanceId, int, float] | None = None
        self._won_s = 0.0  # Time of the last order whose weights most instances have had since.
        # The decode instance that continues streams least exactly, by its test or else by its
        # declaration; None: all continue exactly.
        self.least: tuple[InstanceId | None, Continues] = None, Continues.SEEDED

    @property
    def enabled(self) -> bool:
        return self._enabled

    @property
    def _tests_kv(self) -> bool:
        """Return whether KV is tested: the configuration has two instances that could
        exchange it.
        """
        if not self._may_test_kv:
            return False
        # The search runs at each report, and stops at the first pair of roles.
        roles: list[Role] = []
        for one in self._known.values():
            if one.health is Health.REMOVED:
                continue
            if any(_can_exchange(one.role, o) or _can_exchange(o, one.role) for o in roles):
                return True
            if one.role not in roles:
                roles.append(one.role)
        return False

    def up(self, info: InstanceInfo, now_s: float) -> None:
        """Note a new process of the instance, or changed abilities of the same process."""
        life = self.processes.get(info.id)
        if life is not None and _process(life.info) == _process(info):
            life.info = info
        else:
            self.processes[info.id] = _next_process(info, life, now_s)
            chosen, epoch, _ = self._chosen or ("", 0, 0.0)
            if chosen == info.id and epoch != info.epoch:
                self._chosen = None  # The order was for the process before.
            self.stores.begin(info.id)
            for other in self.processes.values():
                other.partners.discard(info.id)
        self._compare()
        self._reported[info.id] = self._known_of(info.id)  # The event of its coming up tells it.
        self._note_due()

    def lost(self, instance: InstanceId) -> None:
        life = self.processes.get(instance)
        if life is not None and life.test is not None:
            is_of_rows = isinstance(life.test, RestoreTest)
            (life.of_rows if is_of_rows else life.tries).losses += 1

    def rows_changed(self) -> None:
        """Repeat failed tests of rows: agents now serve other rows."""
        for life in self.processes.values():
            life.of_rows.failures, life.of_rows.at_s = 0, 0.0
        self._note_due()

    def forget(self, instance: InstanceId) -> None:
        """Forget an instance that was removed from the cluster."""
        self.processes.pop(instance, None)
        self.stores.forget(instance)
        self._reported.pop(instance, None)
        self._digests.pop(instance, None)
        self._compare()

    def rows_reported(self, regions: Iterable[RegionReport]) -> bool:
        """Note the digests of weights in an agent's report; return whether one is new. An agent
        knows at once when an engine ends, so what it serves alive of an instance that is up is of
        its present process.
        """
        is_new = False
        for region in regions:
            if not region.weights or region.engine not in self._known:
                continue
            if region.is_alive or region.engine not in self._digests:
                is_new |= self._digests.get(region.engine) != region.weights
                self._digests[region.engine] = region.weights
            life = self.processes.get(region.engine)
            is_up = region.is_alive and self._known[region.engine].health is Health.UP
            if is_up and life is not None and life.digest != region.weights:
                if life.digest:  # The process was replaced, and only its agent has noticed.
                    life.generated = life.glimpse = life.moves_kv = life.restores = None
                life.digest, is_new = region.weights, True
        if is_new:
            self._compare()
        return is_new

    def choose(self, instance: InstanceId, epoch: int, ordered_s: float) -> None:
        """Let the weights of an instance's process of this epoch count as right, by an operator's
        order at this time of the wall clock.
        """
        # An order is later than any before it, whatever the clocks of other proxies say.
        self._chosen = instance, epoch, max(ordered_s, self.choice.ordered_s + 1e-3)
        self._compare()

    def heard(self, choice: RightWeights) -> bool:
        """Take another proxy's choice: a later order, or any choice if this proxy has none; return
        whether it was taken.
        """
        is_later = choice.ordered_s > self.choice.ordered_s
        if not choice.marks or not (is_later or not self.choice.marks):
            return False
        self.choice, self._chosen = choice, None
        self._compare()
        return True

    def standing(self, instance: InstanceId) -> Standing:
        """Judge the weights of an instance's present process."""
        life = self.processes.get(instance)
        if not self._enabled or life is None:
            return Standing.NOT_COMPARED
        found = self.comparison.standing(life.shown)
        # Some prefill instances generate nothing: then only a digest shows their weights.
        is_comparable = life.decodes or (self._may_show(life) and not life.shows_nothing)
        unknown = found is Standing.UNTESTED and not is_comparable
        return Standing.NOT_COMPARED if unknown else found

    def _may_show(self, life: TestedProcess) -> bool:
        """Return whether a process that only prefills may generate tokens, and has not yet."""
        return self._prefill_generates and not life.decodes and life.glimpse is None

    def _vote(self, instance: InstanceId) -> Vote:
        """Return what the instance's present process has shown, or else its last one."""
        life, digest = self.processes.get(instance), self._digests.get(instance, "")
        for vote in () if life is None else (life.vote, life.former_vote):
            if vote.marks:
                return vote
        return Vote(digest=digest)

    def seen(self, instance: InstanceId) -> Seen:
        """Results of an instance's tests, in the form that the policy gets."""
        life = self.processes.get(instance)
        if not self._enabled or life is None:
            return Seen(moves_kv=not self._enabled)
        seen = life.seen
        if not self._tests_kv:
            seen = msgspec.structs.replace(seen, moves_kv=True)
        store = None if self._known[instance].shared.has_tier else self.stores.of(instance)
        if store is not None:
            seen = msgspec.structs.replace(seen, restores=store.restores, store=store)
        return seen

    def continues(self, instance: InstanceId) -> Continues | None:
        """Exactness of the instance's continuations; None: not tested yet."""
        generated = self.seen(instance).generated
        return None if generated is None else generated.continues

    def _compare(self) -> None:
        """Group the instances by their tested outputs, and find the one that continues least
        exactly.
        """
        present = [known for known in self._known.values() if known.health is not Health.REMOVED]
        voters = [known for known in present if known.role is not Role.PREFILL]
        votes = {known.id: self._vote(known.id) for known in voters}
        chosen, epoch, ordered_s = self._chosen or ("", 0, 0.0)
        life = self.processes.get(InstanceId(chosen))
        if life is not None and life.info.epoch == epoch and life.vote.marks:
            self._chosen, self.choice = None, RightWeights(life.vote.marks, ordered_s)
        choice = self.choice
        if choice.ordered_s <= self._won_s:  # From then on votes count again.
            choice = RightWeights(choice.marks)
        self.comparison = compare(
            {name: vote for name, vote in votes.items() if vote.marks}, choice, len(voters)
        )
        if self.comparison.has_majority(len(voters)):
            self._won_s = self.choice.ordered_s
        # Ordered weights stay right, also while no instance has them.
        marks, is_ordered = self.comparison.marks, bool(self.choice.ordered_s)
        if marks and (marks & self.choice.marks or not is_ordered):
            self.choice = RightWeights(marks, self.choice.ordered_s)
        self.least = None, Continues.SEEDED
        for name in self._known:
            life, is_other = self.processes.get(name), self.standing(name) is Standing.OTHER
            # No exact stream goes to an instance with other weights, however that continues it.
            if life is not None and life.decodes and not is_other:
                is_exact = Capability.EXACT_RESUME in life.info.capabilities
                declared = Continues.SEEDED if is_exact else Continues.GREEDY
                if (found := self.continues(name) or declared).is_below(self.least[1]):
                    self.least = name, found

    def news(self, instances: Container[InstanceId]) -> list[ev.SelfTested]:
        """Events for the policy: about these instances, if tested, and about others whose results
        have changed.
        """
        found = list[ev.SelfTested]()
        for name in self.processes:
            told = self._known_of(name)
            is_new = name in instances or self._reported[name] != told
            if is_new and self._known[name].health is Health.UP:
                self._reported[name] = told
                found.append(told)
        return found

    def _known_of(self, instance: InstanceId) -> ev.SelfTested:
        seen, is_doubted = self.seen(instance), self.standing(instance).is_doubted
        facts = seen.moves_kv, seen.tokens, seen.restores, is_doubted, seen.store, seen.generates
        return ev.SelfTested(instance, self.processes[instance].info.epoch, *facts)

    def differ(self, processes: Sequence[TestedProcess]) -> bool:
        """Return whether two of these processes are known to have different weights."""
        pairs = combinations([process.vote for process in processes], 2)
        return any(one.likeness(other) is Likeness.OTHER for one, other in pairs)

    def goes_on(
        self,
        began: TestedProcess | None,
        target: InstanceId,
        *,
        sampled: bool,
        replays: bool = False,
    ) -> bool:
        """Return whether `target` continues the output of `began` exactly, by its test; without one
        only if nothing is known of either. `replays`: by a replay, which restores the random number
        generator of a sampled output.
        """
        before = None if began is None else began.seen.generated
        after = self.seen(target).generated
        if after is None:
            return before is None
        if after.continues in (Continues.TEXT, Continues.NONE):
            return False
        if sampled and not replays and after.continues is not Continues.SEEDED:
            return False
        if before is None:
            return True
        return before.seeded == after.seeded if sampled else before.greedy == after.greedy

    def describe(self, instance: InstanceId) -> dict[str, Any] | None:
        """Plain data for the state; None: the instance has not been up."""
        life = self.processes.get(instance)
        if life is None or not self._enabled:
            return None
        continues = self.continues(instance)
        others, near = self.different(instance)
        store = self.stores.describe(instance)
        is_shown = life.moves_kv is not None or life.partners or life.former.moves_kv
        return {
            "done": life.test is None and self._is_done(life),
            "continues": None if continues is None else continues.value,
            "moves_kv": self.seen(instance).moves_kv if self._tests_kv and is_shown else None,
            "restores": life.seen.restores if store is None else store["restores"],
            "store": store,
            "capabilities": _capabilities(life.info, self.seen(instance)),
            "differs_from": others,
            "near_ties_with": near,
            "weights": self.standing(instance).value,
            "weights_digest": life.digest if life.info.engine else "",
            "failures": life.tries.failures + life.of_rows.failures,
            "cause": life.tries.cause or life.of_rows.cause,
        }

    def different(self, instance: InstanceId) -> tuple[list[InstanceId], list[InstanceId]]:
        """Instances with other tokens or other weights than this instance, and instances that
        differ only by near-ties.
        """
        life = self.processes[instance]
        mine, whole = life.shown, life.generated
        found = list[InstanceId](), list[InstanceId]()
        for other in sorted(self.processes):
            theirs, its_whole = self.processes[other].shown, self.processes[other].generated
            if other == instance or not mine.marks or not theirs.marks:
                continue
            one, two = mine.generated, theirs.generated
            tokens = None if one is None or two is None else one.likeness(two)
            if Likeness.OTHER in (tokens, mine.likeness(theirs)):
                found[0].append(other)
            elif tokens is Likeness.NEAR or (whole and its_whole and whole.name != its_whole.name):
                found[1].append(other)
        return found

    def next(self, now_s: float) -> SelfTest | None:
        """Return the next test to run (None: none is due); an instance has at most one at a time,
        and stays busy until its outcome is reported.
        """
        if not self._enabled or (test := next(self._due(now_s), None)) is None:
            return None
        for name in test.names:
            self.processes[name].test = test
        return test

    def _due(self, now_s: float) -> Iterator[SelfTest]:
        idle = [life for life in self.processes.values() if life.test is None]
        free = [life for life in idle if life.tries.at_s <= now_s and self._may_be_tested(life)]
        silent = [life for life in free if self._may_show(life) and life.shows_nothing]
        lacking = [life for life in free if life.lacks_tokens or self._may_show(life)]
        yield from (TokensTest(life.info.id) for life in lacking if life not in silent)
        # A process stays doubted without it, so a test that always failed is tried on, rarely.
        late = (life for life in idle if self._is_late(life) and life.tries.at_s <= now_s)
        yield from (TokensTest(life.info.id) for life in late)
        for life in free:
            if self._tests_kv and (transfer := _transfer_test(life, free)) is not None:
                yield transfer
        # A process that has refused may refuse again, so tests of KV do not wait for it.
        yield from (TokensTest(life.info.id) for life in silent)
        # Each instance that is up may have rows to load. Targets with the fewest failures go first,
        # because a test also occupies its holder.
        holders = [life.info.id for life in idle if self._known[life.info.id].health is Health.UP]
        for life in sorted(free, key=lambda life: life.of_rows.failures):
            due = life.of_rows.at_s <= now_s
            if due and (restore := self._restore_test(life, holders)) is not None:
                yield restore

    def next_retry_s(self, now_s: float) -> float | None:
        """Return the earliest time when a waiting instance may be tested; None: no
        instance waits.
        """
        waiting = (
            tries.at_s
            for life in self.processes.values()
            for tries in (life.tries, life.of_rows)
            if tries.at_s > now_s and (self._may_be_tested(life) or self._is_late(life))
        )
        return min(waiting, default=None)

    def glimpsed(self, test: TokensTest, found: Generated) -> None:
        """Note the greedy tokens of a test that runs."""
        life = self.processes.get(test.instance)
        if life is not None and life.test is test:
            life.glimpse = found

    def generated(self, test: TokensTest, found: Generated | None) -> None:
        """Note the result of a test of tokens. None: the process only prefills, and has shown its
        weights (`glimpsed`).
        """
        for life in self._end(test):
            life.generated = found
            life.tries.succeed()
        self._compare()

    def transferred(self, test: TransferTest, *, moved: bool | None) -> None:
        """Note the result of a transfer. `moved`: None if the engine does not count received KV,
        and is believed.

        If nothing moved between two instances, the fault is with the one whose partner has moved KV
        with a third.
        """
        pair = self._end(test)
        for life, other in zip(pair, reversed(pair), strict=True):
            life.tries.succeed()
            if moved is not False:
                life.moves_kv = True
                continue
            life.partners.add(other.info.id)
            if not life.moves_kv:
                life.tries.cause = f"no KV moved from {test.holder} to {test.target}"
                life.former_results = msgspec.structs.replace(life.former_results, moves_kv=False)
            if life.moves_kv is None and other.moves_kv:
                life.moves_kv = False

    def restored(
        self, test: RestoreTest, fault: str, now_s: float, *, is_wrong: bool | None = False
    ) -> None:
        """Note the result of a restore test. `fault`: why the target cannot continue from KV of an
        agent, or of the engines' own store (`test.in_store`); empty: it can. `is_wrong`: whether it
        continued with other tokens; None: the test was not carried out.

        After a fault the test is repeated, with pauses that double, because the cause may pass. If
        the target's former process passed a test of an agent's KV, the target counts as restoring
        until the test has failed twice, or shown other tokens: the test follows the loss of a
        process, when rows come late and streams have nowhere else to go. For a store only tests of
        the present process count.
        """
        for life in self._end(test):
            if life.info.id != test.target:
                continue
            if fault:
                is_first = not is_wrong and not life.of_rows.cause
                believed = is_first and not test.in_store and life.former.restores
                life.restores = None if believed else False
                life.of_rows.fail(fault, now_s)
                if test.in_store:
                    self.stores.failed(test.target, is_wrong=is_wrong)
            else:
                # A store's test says nothing about rows that agents may serve later.
                life.restores = None if test.in_store else True
                life.of_rows.succeed()
                if test.in_store:
                    self.stores.passed(test.target, test.holder)

    def put_off(self, test: RestoreTest, cause: str, now_s: float) -> None:
        """Repeat a test that has shown nothing, without counting a failure, after pauses that
        double.
        """
        for life in self._end(test):
            if life.info.id == test.target:
                life.of_rows.put_off(cause, now_s)

    def failed(self, test: SelfTest, cause: str, now_s: float) -> None:
        """Repeat a test that could not be carried out, after pauses that double. An error in a test
        of rows is the target's fault: recoveries would fail likewise.
        """
        if isinstance(test, RestoreTest):
            self.restored(test, cause, now_s, is_wrong=None)
            return
        for life in self._end(test):
            life.tries.fail(cause, now_s)
            life.shows_nothing |= isinstance(test, TokensTest) and not life.decodes

    def _end(self, test: SelfTest) -> list[TestedProcess]:
        """End a test and return its processes; empty if a process is gone."""
        lives = [self.processes.get(name) for name in test.names]
        found = [life for life in lives if life is not None and life.test is test]
        for life in found:
            life.test = None
        return found if len(found) == len(lives) else []

    def _may_be_tested(self, life: TestedProcess) -> bool:
        return (
            self._known[life.info.id].health is Health.UP
            and life.tries.failures < _MAX_FAILURES
            and life.tries.losses < _MAX_LOSSES
        )

    def _is_late(self, life: TestedProcess) -> bool:
        """Return whether only the rare tests of tokens are left to a process that has none."""
        is_up = self._known[life.info.id].health is Health.UP
        return is_up and life.lacks_tokens and not self._may_be_tested(life)

    def _is_done(self, life: TestedProcess) -> bool:
        """Return whether no test of this process is left with the instances that are up."""
        if not self._may_be_tested(life):
            return True
        others = [each for each in self.processes.values() if self._may_be_tested(each)]
        if life.lacks_tokens or self._may_show(life):
            return False
        if self._tests_kv and _transfer_test(life, others) is not None:
            return False
        names = [each.info.id for each in others]
        return life.restores is not None or self._restore_test(life, names) is None

    def _restore_test(
        self, life: TestedProcess, others: Iterable[InstanceId]
    ) -> RestoreTest | None:
        """Return a restore test of the process; None: no holder is left. Each failure moves on to
        another holder, because the holder may be at fault.
        """
        target, failures = life.info.id, life.of_rows.failures
        if life.generated is None or life.of_rows.losses >= _MAX_LOSSES:
            return None
        names, in_store = [name for name in others if name != target], False
        holders, known = list[InstanceId](), self._known
        if not life.restores and failures < _MAX_FAILURES:
            holders = [each for each in names if self._loads_rows_of(known[target], known[each])]
        if not holders and not self.stores.is_settled(target):
            in_store = True
            holders = [each for each in names if self.stores.may_share(target, each)]
        return RestoreTest(holders[failures % len(holders)], target, in_store) if holders else None


def _next_process(info: InstanceInfo, before: TestedProcess | None, now_s: float) -> TestedProcess:
    # An engine of kvrs reports a digest of its weights.
    life = TestedProcess(info, digest="" if info.engine else info.fingerprint)
    if before is not None:
        life.follow(before)
    if before is not None and _version(before.info) == _version(info):
        life.passed_before = before.passed_before or before.generated is not None
        life.tries.losses, life.of_rows.losses = before.tries.losses, before.of_rows.losses
        life.tries.at_s = 0.0 if life.former == Seen() else now_s + _LATER_S
    if life.tries.losses >= _MAX_LOSSES and not life.passed_before:
        life.tries.at_s = now_s + _LONGEST_PAUSE_S
        life.tries.cause = "the instance has ended in its tests"
    if life.of_rows.losses >= _MAX_LOSSES:
        life.restores = False
        life.of_rows.cause = "the instance has ended in its tests of rows"
    return life


def _transfer_test(life: TestedProcess, others: Iterable[TestedProcess]) -> TransferTest | None:
    """Return a transfer test with another instance, preferably one that has moved KV; None: no
    partner is left.
    """
    first: TransferTest | None = None
    for other in others if life.moves_kv is None else ():
        if other is life or other.info.id in life.partners or other.moves_kv is False:
            continue
        for holder, target in ((life.info, other.info), (other.info, life.info)):
            if _can_exchange(holder.role, target.role):
                test = TransferTest(holder.id, target.id)
                if other.moves_kv:
                    return test
                first = first or test
    return first


def _capabilities(info: InstanceInfo, seen: Seen) -> list[str]:
    """Capabilities that the instance declares, without those that its tests have refuted, and a
    word for the way in which it continues a stream, if a test has shown it.
    """
    unseen = set() if seen.moves_kv else {*_OF_KV}
    names = [each.value for each in info.capabilities if each not in unseen]
    return names if seen.generated is None else [*names, seen.generated.continues.value]


def _process(info: InstanceInfo) -> tuple[object, ...]:
    # The epoch, which rises with every process, identifies a process without a pid (0).
    return (info.pid or info.epoch, tuple(info.worker_pids), info.model, info.fingerprint)


def _version(info: InstanceInfo) -> tuple[object, ...]:
    return info.model, info.fingerprint, info.engine, tuple(info.capabilities)


def _can_exchange(holder: Role, target: Role) -> bool:
    return holder is not Role.DECODE and _decodes(target)


def _decodes(role: Role) -> bool:
    return role is not Role.PREFILL
