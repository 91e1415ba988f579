"""Weights of the instances: which of them are equal, and which are right.

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
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvrs.core.fleet.tested import Generated, Likeness
from kvrs.ids import InstanceId


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
