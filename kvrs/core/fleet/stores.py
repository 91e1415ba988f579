"""Stores of KV that engines share by themselves (LMCache, Mooncake): which instances went on
rightly behind what such a store had, and how much it had of what recoveries asked for.

A store is not believed before a self-test, which each process of an instance is to pass: what is
wrong in stores comes with restarts. Where recoveries find nothing any more, the store itself may
have been restarted, and the test is due again.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvrs.core.model.events import StoreSeen
from kvrs.core.model.member import Member
from kvrs.ids import InstanceId
from kvrs.protocol.instance import FetchReport

_WEIGHT = 0.5  # Of the newest share: stores lose all at once.
_LOST = 0.2  # With so small a share the store may be another one.
_TESTED_SHARE = 0.5  # At least, after a test that was passed.
# More changes decisions.
_STEP = 0.05
# Some stores have pieces of so many tokens, and nothing of less.
_LEAST_ASKED_TOKENS = 256
_OTHER = "other"


class Stores:
    """The stores of all instances, as far as they were seen. To be read by `of`."""

    def __init__(self, known: Mapping[InstanceId, Member], *, enabled: bool) -> None:
        self._known = known
        self._enabled = enabled
        self._spaces: dict[InstanceId, str] = {}
        self._passed: dict[InstanceId, float] = {}  # With the share that recoveries found.
        # Whether tokens were wrong; None: the test could not be carried out.
        self._failed: dict[InstanceId, bool | None] = {}
        self._shares: dict[InstanceId, float] = {}
        self._counted: dict[InstanceId, frozenset[FetchReport]] = {}
        # The kind that an instance had last: its next process is not trusted before it reports.
        self._kinds: dict[InstanceId, str] = {}

    def begin(self, instance: InstanceId) -> None:
        """Another process of the instance has come up."""
        for book in (self._spaces, self._passed, self._failed, self._shares, self._counted):
            book.pop(instance, None)

    def forget(self, instance: InstanceId) -> None:
        """The instance is no part of the cluster any more."""
        self.begin(instance)
        self._kinds.pop(instance, None)

    def may_share(self, target: InstanceId, holder: InstanceId) -> bool:
        """Both load KV of one model from stores of one kind, as far as they tell."""
        one, other = self._known[target], self._known[holder]
        if not one.store or one.store != other.store or one.info is None or other.info is None:
            return False
        return one.info.model == other.info.model

    def is_settled(self, instance: InstanceId) -> bool:
        """Nothing is left to be tested in this process."""
        return instance in self._passed or self._failed.get(instance) is True

    def passed(self, target: InstanceId, holder: InstanceId) -> None:
        """The target has gone on rightly behind what the holder had stored."""
        # Another process of the holder may have other weights below the same name.
        own = f"store of {holder} {self._known[holder].epoch}"
        space, former = self._spaces.get(holder, own), self._spaces.get(target)
        alike = [each for each, its in self._spaces.items() if its == former]
        if not self._failed.get(holder):
            alike.append(holder)
        self._spaces |= dict.fromkeys([*alike, target], space)
        self._failed.pop(target, None)
        self._passed[target] = max(_TESTED_SHARE, self._shares.get(target, 1.0))

    def failed(self, target: InstanceId, *, is_wrong: bool | None) -> None:
        """It has not, or with other tokens than it computes itself; None: it was not seen."""
        self._failed[target] = is_wrong
        self._passed.pop(target, None)
        if is_wrong:
            self._spaces.pop(target, None)

    def of(self, instance: InstanceId) -> StoreSeen | None:
        """None: no store of it was seen."""
        space = self._spaces.get(instance)
        if space is None:
            return None
        share = self._passed.get(instance)
        return StoreSeen(space, share is not None, share or 0.0)

    def describe(self, instance: InstanceId) -> dict[str, Any] | None:
        """Plain data for the state; None: it tells of no store."""
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
        """The instance loads from a store by itself, and that was not seen yet, or was wrong: a
        recovery there must not find anything in it. In one that had nothing of another instance it
        may find what its own process has stored.
        """
        known = self._known[instance]
        kind = known.store or ("" if known.has_tier else self._kinds.get(instance, ""))
        if not self._enabled or not kind or instance in self._passed:
            return False
        return self._failed.get(instance) is not False

    def fetched(self, instance: InstanceId, fetches: Iterable[FetchReport]) -> bool:
        """Recoveries have loaded so much there; each is reported several times. Return whether the
        policy is to be told.
        """
        kind = self._known[instance].store
        if kind or self._kinds.get(instance) != _OTHER:  # That one is seen by its first load.
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
