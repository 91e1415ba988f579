"""The oracle compares the stream that survived a fault with the same stream without a fault.

A token is **lost** when only the clean run has it, **repeated** when the faulted run has an extra
token, and **different** when both runs have unequal tokens in the same place. For unequal streams
the decision uses a shortest-edit view of the two sequences (difflib): deletions are lost,
insertions repeated, and a replacement of m tokens by n counts min(m, n) different and the rest as
lost or repeated. A truncated tail is therefore lost. For every pair of sequences `len(clean) - lost
+ repeated == len(faulted)`, and all three are 0 only for equal sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from kvrs_lab.traces.records import StreamRecord


@dataclass(frozen=True, slots=True)
class Difference:
    lost: int = 0
    repeated: int = 0
    different: int = 0

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(
            self.lost + other.lost, self.repeated + other.repeated, self.different + other.different
        )

    @property
    def exact(self) -> bool:
        return self == Difference()


@dataclass(frozen=True, slots=True)
class StreamVerdict:
    """The oracle's verdict on one stream."""

    index: int
    tokens: Difference
    text_equal: bool  # A seam can break a character or drop a space with equal ids.
    finish_equal: bool  # Finish reason and reported usage.
    verified: bool  # False: the clean run failed, so nothing can be compared.

    @property
    def exact(self) -> bool:
        return self.verified and self.tokens.exact and self.text_equal and self.finish_equal


def compare(faulted: Sequence[int], clean: Sequence[int]) -> Difference:
    """Count lost, repeated and changed tokens of `clean`. Equal sequences cost one pass."""
    start = _common_prefix(faulted, clean)
    if start == len(faulted) == len(clean):
        return Difference()
    total = Difference()
    matcher = SequenceMatcher(None, clean[start:], faulted[start:], autojunk=False)
    for kind, clean_from, clean_to, faulted_from, faulted_to in matcher.get_opcodes():
        if kind == "equal":
            continue
        had, has = clean_to - clean_from, faulted_to - faulted_from
        total += Difference(
            lost=max(0, had - has), repeated=max(0, has - had), different=min(had, has)
        )
    return total


def judge(faulted: Sequence[StreamRecord], clean: Sequence[StreamRecord]) -> list[StreamVerdict]:
    """One verdict per stream of the faulted run, by request index."""
    by_index = {record.index: record for record in clean}
    return [_judge_one(record, by_index.get(record.index)) for record in faulted]


def total(verdicts: Sequence[StreamVerdict]) -> Difference:
    """Sum the differences of all streams that could be verified."""
    return sum((verdict.tokens for verdict in verdicts), Difference())


def _judge_one(faulted: StreamRecord, clean: StreamRecord | None) -> StreamVerdict:
    if clean is None or not clean.completed:
        return StreamVerdict(
            faulted.index, Difference(), text_equal=False, finish_equal=False, verified=False
        )
    return StreamVerdict(
        faulted.index,
        compare(faulted.token_ids, clean.token_ids),
        text_equal=faulted.text == clean.text,
        finish_equal=(faulted.finish_reason, faulted.usage_tokens)
        == (clean.finish_reason, clean.usage_tokens),
        verified=True,
    )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
