"""Comparison of the tokens that instances computed in their self-tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrs.core.fleet.generated import Generated, Likeness
from kvrs.ids import InstanceId


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups of instances with equal weights, judged by their tokens."""

    # `Member.weights` of each instance: the name of the group's first instance.
    weights: Mapping[InstanceId, InstanceId] = field(default_factory=dict)
    near_ties: bool = False  # Instances of equal weights differ by near-ties.
    # Instances of equal weights differ by near-ties, or only in sampled streams.
    sampled_ties: bool = False

    def has_ties(self, *, sampled: bool) -> bool:
        """Streams, sampled or at temperature 0, may differ between instances of equal weights."""
        return self.sampled_ties if sampled else self.near_ties

    @property
    def has_other_weights(self) -> bool:
        return len(set(self.weights.values())) > 1


def compare(generated: Mapping[InstanceId, Generated]) -> Comparison:
    """Compare each distinct result with every other, however many instances gave it."""
    firsts: dict[tuple[object, ...], InstanceId] = {}
    for name in sorted(generated):
        firsts.setdefault(_tokens(generated[name]), name)
    weights: dict[InstanceId, InstanceId] = {}
    near_ties = sampled_ties = False
    for name in firsts.values():
        mine, alike = generated[name], {name}
        for other in weights:
            theirs = generated[other]
            likeness = mine.likeness(theirs)
            if likeness is Likeness.OTHER:
                continue
            alike.add(weights[other])
            near_ties |= likeness is Likeness.NEAR
            is_level = mine.seeded == theirs.seeded or mine.continues is not theirs.continues
            sampled_ties |= near_ties or not is_level
        weights[name] = first = min(alike)
        weights |= {other: first for other, its in weights.items() if its in alike}
    return Comparison(
        {name: weights[firsts[_tokens(each)]] for name, each in generated.items()},
        near_ties,
        sampled_ties,
    )


def _tokens(generated: Generated) -> tuple[object, ...]:
    return generated.greedy, generated.seeded, generated.continues
