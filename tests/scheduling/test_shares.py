"""Prefill batches are shared out as RaidServe's Algorithm 1 does it, token by token."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from kvrs_engine.scheduling.shares import PrefillCost, Waiting, shared_out
from kvrs_testkit.examples import examples

COSTS = st.builds(
    PrefillCost, st.integers(0, 500), st.integers(0, 20), st.integers(1, 9), st.integers(0, 3)
)
LINES = st.lists(
    st.builds(Waiting, st.integers(0, 4), st.integers(0, 60), st.integers(0, 40)), max_size=9
)


def literal(waiting: list[Waiting], budget: int, cost: PrefillCost) -> list[int]:
    """Algorithm 1 as it is printed; candidates are the batches at which a rank has run out, and
    the last one.
    """
    ranks = list(dict.fromkeys(each.rank for each in waiting if each.tokens))
    tokens = {
        rank: [
            (index, each.first + at)
            for index, each in enumerate(waiting)
            if each.rank == rank
            for at in range(each.tokens)
        ]
        for rank in ranks
    }
    load = dict.fromkeys(ranks, 0)
    batch = [0] * len(waiting)
    best: tuple[Fraction, int] = (Fraction(-1), 0)
    chosen = list(batch)
    while sum(batch) < budget and any(tokens.values()):
        least = min((rank for rank in ranks if tokens[rank]), key=lambda rank: load[rank])
        index, position = tokens[least].pop(0)
        batch[index] += 1
        load[least] += cost.base_ps + cost.per_position_ps * position
        if not tokens[least] or sum(batch) == budget:
            count = sum(batch)
            took_ps = cost.step_ps + cost.dense_ps * count + max(load.values())
            if (rate := (Fraction(count, took_ps), count)) > best:
                best, chosen = rate, list(batch)
    return chosen


@examples(400)
@given(waiting=LINES, budget=st.integers(0, 200), cost=COSTS)
def test_tokens_are_shared_out_as_by_the_literal_algorithm(
    waiting: list[Waiting], budget: int, cost: PrefillCost
) -> None:
    """The search for the level finds the batch that a loop over tokens finds."""
    assert shared_out(waiting, budget, cost) == literal(waiting, budget, cost)


@examples(200)
@given(waiting=LINES.filter(lambda line: any(each.tokens for each in line)), cost=COSTS)
def test_the_first_in_line_is_in_every_batch(waiting: list[Waiting], cost: PrefillCost) -> None:
    """Among equally loaded ranks, that of the first in line goes first."""
    first = next(at for at, each in enumerate(waiting) if each.tokens)

    assert shared_out(waiting, 1, cost)[first] == 1


def test_raidserves_figure_3() -> None:
    """A budget of 3: not three tokens of one request, but one on each rank."""
    flat = PrefillCost(step_ps=10, dense_ps=0, base_ps=1, per_position_ps=0)
    waiting = [Waiting(0, 0, 4), Waiting(1, 0, 1), Waiting(2, 0, 1)]

    assert shared_out(waiting, 3, flat) == [1, 1, 1]
