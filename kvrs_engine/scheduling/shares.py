"""The division of a prefill batch among sequences such that the loads of the ranks are even:
RaidServe's Algorithm 1 (adaptive chunked prefill) without a loop over tokens.

The paper's algorithm gives the least loaded rank its next token until the budget is used up, and
then chooses one of the intermediate batches. A token at position `p` costs
`base + per_position * p`, so the load of a rank before its token `k` has a closed form that rises
with `k`. The batch of `n` tokens has the `n` tokens with the least loads before them, which are
found by a search for the load level.

The paper leaves the cost and the choice open. Here the candidates are the batches at which a rank
has run out of tokens, and the whole budget; the best candidate has the most tokens per predicted
second, on a tie the most tokens. Costs are integers, so that ties are exact. Among equally loaded
ranks the rank of the first sequence in line comes first.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt

from kvrs.profiles.tables import PrefillTable
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import Units

# Number of tokens of the two points of a prefill table from which costs are derived.
_TOKENS = 64
_PS = 1e12


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The cost of a batch in picoseconds: `step + dense * tokens +` the largest load of a rank."""

    step_ps: int
    dense_ps: int
    base_ps: int  # Load of a token on its rank, at least 1.
    per_position_ps: int  # Additional load of a token for each token before it.


@dataclass(frozen=True, slots=True)
class Waiting:
    """The tokens of a sequence that are to be computed, from position `first` on."""

    rank: int
    first: int
    tokens: int


# Returns the number of tokens of each waiting sequence in a batch of at most the given size.
Share = Callable[[Sequence[Waiting], int], list[int]]


def in_line(waiting: Sequence[Waiting], budget: int) -> list[int]:
    """Divide the budget first come, first served."""
    taken = []
    for each in waiting:
        taken.append(min(each.tokens, budget))
        budget -= taken[-1]
    return taken


def shared_out(waiting: Sequence[Waiting], budget: int, cost: PrefillCost) -> list[int]:
    """Return the number of tokens of each sequence in the next batch. `waiting` is in order of the
    queue; the sequences of a rank are taken in that order.
    """
    lines: dict[int, _Line] = {}
    for at, each in enumerate(waiting):
        if each.tokens:
            if each.rank not in lines:
                lines[each.rank] = _Line(cost)
            lines[each.rank].append(at, each)
    ranks = list(lines.values())
    taken = _fill(ranks, min(budget, sum(line.tokens for line in ranks)))
    candidates = []
    for place, (line, count) in enumerate(zip(ranks, taken, strict=True)):
        if count == line.tokens:
            last = line.load_before(count - 1)
            candidates.append([other.below(last + (at <= place)) for at, other in enumerate(ranks)])
    best, (best_tokens, best_ps) = taken, _pace(taken, ranks, cost)
    for counts in candidates:
        tokens, took_ps = _pace(counts, ranks, cost)
        if (tokens * best_ps, tokens) > (best_tokens * took_ps, best_tokens):
            best, best_tokens, best_ps = counts, tokens, took_ps
    result = [0] * len(waiting)
    for line, count in zip(ranks, best, strict=True):
        for index, tokens in line.split(count):
            result[index] = tokens
    return result


def _pace(counts: Sequence[int], ranks: "Sequence[_Line]", cost: PrefillCost) -> tuple[int, int]:
    """Return the number of tokens of a batch, and its cost in picoseconds."""
    tokens = sum(counts)
    loads = [line.load_before(count) for line, count in zip(ranks, counts, strict=True)]
    return tokens, cost.step_ps + cost.dense_ps * tokens + max(loads, default=0)


def prefill_cost(layout: Layout, units: Units, prefill: PrefillTable) -> PrefillCost | None:
    """Derive the cost of a prompt token on all ranks, and on the rank with its spread heads, from a
    table that was measured with evenly divided attention; None: no head is spread.

    The part of the time that rises with the position counts as attention; of the rest, attention
    gets its share of the weights.
    """
    if not layout.turns:
        return None
    heads, ranks = len(units.attention_bytes), len(layout.turns[0])
    spread = max(len(layout.spread(layer)) for layer in range(units.layers))
    attention = units.layers * sum(units.attention_bytes)
    share = attention / (attention + units.all_mlp_bytes)
    first_s, behind_s = (prefill.extra(before, _TOKENS) for before in (0, _TOKENS))
    token_s = (first_s - prefill.step_overhead_s) / _TOKENS
    rising_s = max(0.0, behind_s - first_s) / _TOKENS / _TOKENS
    on_one = ranks * spread / heads  # Attention on the token's rank, relative to an even share.
    return PrefillCost(
        step_ps=round(prefill.step_overhead_s * _PS),
        dense_ps=max(0, round(token_s * (1 - share * spread / heads) * _PS)),
        base_ps=max(1, round(token_s * share * on_one * _PS)),
        per_position_ps=round(rising_s * on_one * _PS),
    )


class _Line:
    """The tokens of one rank, in order, as runs of consecutive positions."""

    def __init__(self, cost: PrefillCost) -> None:
        assert cost.base_ps >= 1, "every token costs something"
        self._cost = cost
        self._runs: list[tuple[int, int]] = []  # Index in `waiting`, position of the first token.
        self._starts = [0]  # Number of tokens before each run, then the total.
        self._loads = [0]  # Load before each run, then the total.

    @property
    def tokens(self) -> int:
        return self._starts[-1]

    @property
    def load(self) -> int:
        return self._loads[-1]

    def append(self, index: int, waiting: Waiting) -> None:
        self._runs.append((index, waiting.first))
        self._loads.append(self._loads[-1] + self._run_load(waiting.first, waiting.tokens))
        self._starts.append(self._starts[-1] + waiting.tokens)

    def load_before(self, count: int) -> int:
        """Return the load of the first `count` tokens."""
        run = bisect_right(self._starts, count) - 1
        if run == len(self._runs):
            return self._loads[-1]
        return self._loads[run] + self._run_load(self._runs[run][1], count - self._starts[run])

    def below(self, level: int) -> int:
        """Return the number of tokens with a load below `level` before them."""
        if level <= 0:
            return 0
        run = bisect_right(self._loads, level - 1) - 1
        if run == len(self._runs):
            return self._starts[-1]
        # The largest `n` with `_run_load(n) <= left`; the next token counts too.
        left, first = level - 1 - self._loads[run], self._runs[run][1]
        per, base = self._cost.per_position_ps, self._cost.base_ps
        if per:
            linear = 2 * (base + per * first) - per
            count = (isqrt(linear * linear + 8 * per * left) - linear) // (2 * per)
        else:
            count = left // base
        return self._starts[run] + count + 1

    def split(self, count: int) -> list[tuple[int, int]]:
        """Return the index in `waiting` and the number of tokens of each run, for the first `count`
        tokens.
        """
        return [
            (index, min(count - start, end - start))
            for (index, _), start, end in zip(
                self._runs, self._starts, self._starts[1:], strict=False
            )
            if start < count
        ]

    def _run_load(self, first: int, count: int) -> int:
        positions = count * first + count * (count - 1) // 2
        return count * self._cost.base_ps + self._cost.per_position_ps * positions


def _fill(ranks: Sequence[_Line], budget: int) -> list[int]:
    """Return the number of tokens of each rank among the `budget` tokens with the least loads."""
    low, high = 0, max((line.load for line in ranks), default=0) + 1
    low_count, high_count = 0, sum(line.tokens for line in ranks)
    if budget == high_count:
        return [line.tokens for line in ranks]
    # Invariant: fewer tokens than the budget are below `low`, and at least the budget below `high`.
    bisects = False
    while high - low > 1 and high_count != budget:
        # Interpolation alternates with bisection, which bounds the number of rounds.
        share = (low + high) // 2
        if not bisects:
            share = low + (high - low) * (budget - low_count) // (high_count - low_count)
        level = min(max(share, low + 1), high - 1)
        bisects = not bisects
        count = sum(line.below(level) for line in ranks)
        if count < budget:
            low, low_count = level, count
        else:
            high, high_count = level, count
    # Tokens exactly at the level are taken in order of ranks.
    taken = [line.below(low) for line in ranks] if high_count != budget else None
    if taken is None:
        return [line.below(high) for line in ranks]
    left = budget - sum(taken)
    for at, line in enumerate(ranks):
        if left and line.below(high) > taken[at]:
            taken[at] += 1
            left -= 1
    return taken
