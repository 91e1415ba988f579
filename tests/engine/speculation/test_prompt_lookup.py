"""Prompt lookup and its gate."""

from hypothesis import given
from hypothesis import strategies as st

from kvrs_engine.engine.speculation.lookup import PROBE_EVERY_TOKENS, PromptLookup


def test_what_followed_the_last_time_is_proposed() -> None:
    lookup = PromptLookup()
    assert lookup.propose([1, 2, 3, 4, 5, 9, 2, 3], 3) == [4, 5, 9]
    assert lookup.propose([1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 2, 3], 2) == [6, 7]


def test_three_tokens_are_looked_up_before_two() -> None:
    assert PromptLookup().propose([1, 2, 3, 8, 7, 2, 3, 9, 1, 2, 3], 1) == [8]


def test_a_text_that_repeats_itself_goes_on() -> None:
    assert PromptLookup().propose([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_what_was_never_there_has_no_proposal() -> None:
    lookup = PromptLookup()
    assert lookup.propose([], 4) == []
    assert lookup.propose([1, 2], 4) == []
    assert lookup.propose([1, 2, 3], 4) == []


def test_a_gate_stops_proposals_and_probes() -> None:
    lookup, ids = PromptLookup(), [1, 2] * 4
    probes = []
    for _ in range(5 * PROBE_EVERY_TOKENS):
        if lookup.propose(ids, 4):
            probes.append(len(ids))
            lookup.verified(0, len(ids))
        ids.append(ids[-2])
    assert probes[3:6] == [probes[3] + PROBE_EVERY_TOKENS * step for step in range(3)]
    lookup, calls = PromptLookup(), 0
    for _ in range(PROBE_EVERY_TOKENS):
        calls += bool(lookup.propose(ids, 4))
        lookup.verified(1, len(ids))
        ids.append(ids[-2])
    assert calls == PROBE_EVERY_TOKENS


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6), st.data())
def test_it_finds_the_last_place_of_the_longest_suffix(
    ids: list[int], most: int, data: st.DataObject
) -> None:
    """However often it looked before."""
    lookup = PromptLookup()
    for end in sorted(data.draw(st.sets(st.integers(0, len(ids))))):
        lookup.propose(ids[:end], most)

    expected: list[int] = []
    for size in (2, 3):
        places = [at for at in range(size, len(ids)) if ids[at - size : at] == ids[-size:]]
        if places and len(ids) >= size:
            endless = ids[places[-1] :] * (most + 1)
            expected = endless[:most]
    assert lookup.propose(ids, most) == expected
