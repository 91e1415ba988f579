"""Stores of KV that engines share on their own (LMCache, Mooncake): which instances continued
correctly from a store, and the share of the requested KV that it had.

A store is trusted only after a self-test, which each process of an instance must pass, because
faults of stores appear at restarts. If recoveries find nothing any more, the store may have been
restarted, and the test is due again.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvrs.core.model.events import StoreSeen
from kvrs.core.model.member import Member
from kvrs.ids import InstanceId
from kvrs.protocol.instance import FetchReport

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
        kind = known.store or ("" if known.has_tier else self._kinds.get(instance, ""))
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
        page = self._known[instance].page_size_tokens
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
