"""How long it takes to share the tokens of a prefill batch out over ranks (RaidServe, algorithm 1),
and how even the ranks' loads are, beside batches in the order of arrival.
"""

import random
import statistics
import time

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs_engine.scheduling.shares import PrefillCost, Waiting, in_line, shared_out

BUDGET_TOKENS, SEQUENCES, RANKS = 2048, 64, 7
LIMIT_MS = 0.2
# Of the order of Llama-3.1-70B on H100: 86 ms for 2,048 tokens without a prefix, 0.47 ns for each
# pair of tokens.
COST = PrefillCost(step_ps=9 * 10**9, dense_ps=37 * 10**6, base_ps=10**6, per_position_ps=470)
LINES = {
    "long prompts": (500, 16_000),
    "short prompts": (1, 60),
}


def line(draw: random.Random, lengths: tuple[int, int]) -> list[Waiting]:
    return [
        Waiting(draw.randrange(RANKS), draw.randrange(16_000), draw.randint(*lengths))
        for _ in range(SEQUENCES)
    ]


def imbalance(waiting: list[Waiting], taken: list[int]) -> float:
    """The largest load of a rank over the mean of all."""
    loads = [0.0] * RANKS
    for each, tokens in zip(waiting, taken, strict=True):
        positions = tokens * each.first + tokens * (tokens - 1) / 2
        loads[each.rank] += tokens * COST.base_ps + COST.per_position_ps * positions
    return max(loads) / statistics.fmean(loads)


def measure(seed: int, rounds: int) -> dict[str, dict[str, float]]:
    draw = random.Random(seed)
    rows: dict[str, dict[str, float]] = {}
    for name, lengths in LINES.items():
        times_ms, ours, arrival = [], [], []
        for _ in range(rounds):
            waiting = line(draw, lengths)
            started_ns = time.thread_time_ns()
            taken = shared_out(waiting, BUDGET_TOKENS, COST)
            times_ms.append((time.thread_time_ns() - started_ns) / 1e6)
            ours.append(imbalance(waiting, taken))
            arrival.append(imbalance(waiting, in_line(waiting, BUDGET_TOKENS)))
        cuts = statistics.quantiles(times_ms, n=100)
        rows[name] = {
            "p50_ms": cuts[49],
            "p99_ms": cuts[98],
            "largest_over_mean": statistics.median(ours),
            "by_arrival": statistics.median(arrival),
        }
    return rows


def as_text(rows: dict[str, dict[str, float]], rounds: int) -> str:
    lines = [
        f"{BUDGET_TOKENS:,} tokens of {SEQUENCES} sequences on {RANKS} ranks, {rounds} rounds; CPU "
        f"time; limit {LIMIT_MS} ms (p50)",
        "",
        f"{'':14} {'p50 ms':>8} {'p99 ms':>8}   largest load over mean: {'shared out':>10} "
        f"{'by arrival':>10}",
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:14} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f} {'':25} "
            f"{row['largest_over_mean']:10.2f} {row['by_arrival']:10.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, seed=1)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    record = Record(options.seed)
    rows = measure(options.seed, options.rounds)
    text = as_text(rows, options.rounds)
    print(text)
    is_void = record.keep(options.out, "shares", {"rows": rows}, text)
    return 1 if is_void or max(row["p50_ms"] for row in rows.values()) > LIMIT_MS else 0


if __name__ == "__main__":
    raise SystemExit(main())
