"""Tokens per second of a mixture of experts that loses one rank of eight, over time: without copies
of experts, with them, and with experts that are split.

    python -m experiments.experts.simulated

Simulated, on the clock of a published profile of Mixtral-8x22B on eight GPUs: scheduler,
re-forming, copies and layouts are the product's, in virtual time. Experts are chosen by Zipf's law,
in an order that differs from layer to layer. A step is as long as its fullest rank, layer by layer,
by bytes of attention and of the experts' tiles; the profile's are those of experts that are all
chosen equally often. Exit status 1: copies make the ranks slower.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from random import Random

from experiments.command_line import parser_of
from experiments.model_shapes import SHAPES
from experiments.record import Record
from experiments.virtual_time import EqualStreams, grouped, run_until, token_times
from kvrs.ids import StreamId
from kvrs_engine.elastic.moving import LinkRates
from kvrs_engine.elastic.units import Units
from kvrs_lab.sim.cluster import SimCluster
from kvrs_lab.sim.rank_model import RankModel
from kvrs_lab.sim.ranks import SimRanks

NAME = "simulated"
PROFILE, MODEL = "mixtral-8x22b-h100-vllm-tp8", "mistralai/Mixtral-8x22B-v0.1"
RANKS, REQUESTS = 8, 32
STREAMS = EqualStreams(PROFILE, RANKS, REQUESTS, context_tokens=512, output_tokens=4000)
EXPERTS, PARTS, EXPONENTS = 8, 8, (0.0, 0.5, 1.0)
VARIANTS = ("off", "on", "split")
PUBLISHED = {"on": 562.32, "off": 436.61}  # AnchorTP, tokens/s behind a loss, and without balance.
RATES = LinkRates(host_bytes_per_s=25e9, peer_bytes_per_s=100e9)
_GROUPS = 4  # Layers that lie alike, as one.
_BALANCES_AFTER_S, _WINDOW_S, _LONGEST_S, _NEVER_S = 2.0, 2.0, 600.0, 1e6

TokenTimes = Mapping[StreamId, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Row:
    exponent: float
    variant: str
    before: float  # Tokens/s of eight ranks,
    behind: float  # and of seven, once copies have moved where any do.
    pause_s: float
    copies: int


def main() -> int:
    options = parser_of(__doc__, __file__, seed=0).parse_args()
    record = Record(options.seed, timed=False)
    rows = [play(exponent, variant, options.seed) for exponent in EXPONENTS for variant in VARIANTS]
    gains = gains_of(rows)
    figures = {"rows": [asdict(row) for row in rows], "gains": gains, "published": PUBLISHED}
    record.keep(options.out, NAME, figures, as_text(rows, gains))
    return min(gains.values()) < 1.0


def units() -> Units:
    """The model's, with the layers of a group as one, and parts of an expert as of its width."""
    whole = grouped(SHAPES[MODEL].units(), _GROUPS)
    part_bytes = sum(whole.mlp_bytes) // EXPERTS // PARTS
    return replace(whole, mlp_bytes=(part_bytes,) * EXPERTS * PARTS, expert_parts=PARTS)


def model_of(exponent: float, variant: str, seed: int) -> RankModel:
    choose = Random(seed)
    orders = [choose.sample(range(EXPERTS), EXPERTS) for _ in range(_GROUPS)]
    return RankModel(
        units=units(),
        rates=RATES,
        restart_s=_NEVER_S,
        grows_after_s=_NEVER_S,
        tiles=[[1000 / (1 + at) ** exponent for at in order] for order in orders],
        balances_after_s=_BALANCES_AFTER_S if variant == "on" else None,
        split=variant == "split",
        copy_room=1.0,
    )


@contextmanager
def running(model: RankModel, seed: int) -> Iterator[tuple[SimCluster, SimRanks, TokenTimes]]:
    """A cluster once copies have moved, whose streams all have tokens; with the ranks of its
    instance, and the times of tokens by stream.

    Raises AssertionError where an invariant of the simulator is violated.
    """
    with token_times() as tokens_s:
        cluster, ranks, names = STREAMS.begin(STREAMS.config(), model, seed)
        clock = cluster.clock
        run_until(clock, lambda: all(len(tokens_s[name]) > 8 for name in names), 0.5, _LONGEST_S)
        clock.run(clock.now_s + 3 * _BALANCES_AFTER_S)
        yield cluster, ranks, tokens_s


def tokens_per_s(cluster: SimCluster, tokens_s: TokenTimes) -> float:
    """The rate of all streams together, within a window from now on."""
    clock = cluster.clock
    had, from_s = sum(map(len, tokens_s.values())), clock.now_s
    clock.run(from_s + _WINDOW_S)
    return (sum(map(len, tokens_s.values())) - had) / _WINDOW_S


def play(exponent: float, variant: str, seed: int) -> Row:
    """Raises AssertionError where an invariant of the simulator is violated."""
    with running(model_of(exponent, variant, seed), seed) as (cluster, ranks, tokens_s):
        clock = cluster.clock
        before, lost_s = tokens_per_s(cluster, tokens_s), clock.now_s
        ranks.lose([RANKS - 1], memory_kept=False)
        run_until(clock, lambda: ranks.serves, 0.001, _LONGEST_S)
        pause_s = clock.now_s - lost_s
        # What the streams have lost is computed again first.
        clock.run(clock.now_s + 6 * _BALANCES_AFTER_S)
        behind = tokens_per_s(cluster, tokens_s)
    return Row(exponent, variant, before, behind, pause_s, sum(map(len, ranks.layout.copies)))


def gains_of(rows: Sequence[Row]) -> dict[str, float]:
    """Tokens/s of seven ranks with copies over those without, and with split experts."""
    found = {(row.exponent, row.variant): row.behind for row in rows}
    return {
        f"{exponent:g} {variant}": found[exponent, variant] / found[exponent, "off"]
        for exponent in EXPONENTS
        for variant in ("on", "split")
    }


def as_text(rows: Sequence[Row], gains: dict[str, float]) -> str:
    lines = [
        f"SIMULATED on the clock of {PROFILE}, no GPU: {REQUESTS} streams, one of {RANKS} ranks "
        f"lost with its memory",
        "",
        "Zipf  experts   tokens/s: 8 ranks  7 ranks   pause s  copies  over off",
    ]
    for row in rows:
        gain = gains.get(f"{row.exponent:g} {row.variant}", 1.0)
        lines.append(
            f"{row.exponent:4} {row.variant:8} {row.before:18.0f} {row.behind:8.0f} "
            f"{row.pause_s:9.2f} {row.copies:7} {gain:9.2f}"
        )
    published = PUBLISHED["on"] / PUBLISHED["off"]
    lines += ["", f"AnchorTP: {published:.2f}, of a skew that it does not say."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
