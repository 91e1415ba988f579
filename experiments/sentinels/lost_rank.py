"""One of eight ranks is lost with its memory, on the clock of Llama-3.1-70B with 56 requests of 16K
tokens (RaidServe, table 3).

Scheduler, re-forming, layouts and restores are the product's, in virtual time; batches take the
times of the profile, moves their bytes over the paper's links.
"""

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median

from experiments.model_shapes import SHAPES
from experiments.sentinels.lost_kv import with_kv
from experiments.step_times import Degree, Speed
from experiments.virtual_time import HOME, EqualStreams, grouped, patient, run_until, token_times
from kvrs.config.file import Config
from kvrs.core.model.estimates import Option
from kvrs.profiles import catalog
from kvrs_engine.elastic import on_demand
from kvrs_engine.elastic.layouts import hybrid, staged
from kvrs_engine.elastic.moving import LinkRates, schedule
from kvrs_engine.elastic.plans import plan
from kvrs_engine.elastic.speed import shares
from kvrs_engine.elastic.units import Units
from kvrs_lab.sim.process import require
from kvrs_lab.sim.rank_model import RankModel
from kvrs_testkit.layouts import even

PROFILE, MODEL = "llama-3.1-70b-h100-vllm-tp8", "meta-llama/Llama-3.1-70B"
RANKS, REQUESTS, CONTEXT_TOKENS = 8, 56, 16384
KIN_RANKS = 4  # The degree that tells what does not shrink with the ranks.
STREAMS = EqualStreams(PROFILE, RANKS, REQUESTS, CONTEXT_TOKENS, output_tokens=1500)
RATES = LinkRates(host_bytes_per_s=50e9, peer_bytes_per_s=362.2e9)
JOIN_S = 0.1  # Of ranks that form again.
KEEPS_PAGES = ("host", "full")  # Ways with backups of pages.
ORACLE = "oracle"  # Nothing is lost.
_GROUPS = 4  # Layers that lie alike, as one: there are fewer cells to follow.
_LEAST_TOKENS = 8
_STEP_S, _FINE_S, _LONGEST_S = 0.5, 0.001, 600.0
_NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    way: str
    weights_s: float  # Until the ranks that are left compute again.
    # Of the streams' longest pauses from the loss on.
    first_s: float
    p50_s: float
    last_s: float


def units() -> Units:
    return grouped(SHAPES[MODEL].units(), _GROUPS)


def rates_of(way: str) -> LinkRates:
    """Links on which what is missing takes as long as the way's moves do."""
    if way == "full":
        return RATES
    if way == ORACLE:
        return LinkRates(RATES.host_bytes_per_s * _NEVER_S, RATES.peer_bytes_per_s * _NEVER_S)
    model = units()
    before = hybrid(model, staged(model.layers, [range(RANKS)]))
    after = on_demand.reshaped(before, model, on_demand.survivors(before, [RANKS - 1]))
    missing = plan(before, after, model, [RANKS - 1])
    whole = plan(before, after, model, before.ranks)
    slower = schedule(whole, RATES).makespan_s / schedule(missing, RATES).makespan_s
    return LinkRates(RATES.host_bytes_per_s / slower, RATES.peer_bytes_per_s / slower)


def config_of(way: str) -> Config:
    if way not in KEEPS_PAGES:
        return STREAMS.config(mode="off")
    return STREAMS.config(
        capacity_bytes=1 << 40,
        host_to_device_bytes_per_s=RATES.host_bytes_per_s * (RANKS - 1),
        staging_pages=4096,
    )


def play(way: str, seed: int, join_s: float = JOIN_S) -> Row:
    """Raises AssertionError where an invariant of the simulator is violated."""
    model = RankModel(units(), rates_of(way), join_s, _NEVER_S, _NEVER_S)
    with token_times() as tokens_s, patient(_LONGEST_S):
        cluster, ranks, names = STREAMS.begin(config_of(way), model, seed)
        clock, proxy, engine = cluster.clock, cluster.serving[0], cluster.engines[HOME]

        def is_settled() -> bool:
            """All decode, and of each at most the newest page has no backup."""
            lag_pages = engine.backlog.lag_pages if cluster.agents else 0
            return lag_pages <= REQUESTS and all(
                len(tokens_s[name]) >= _LEAST_TOKENS for name in names
            )

        run_until(clock, is_settled, _STEP_S, _LONGEST_S)
        clock.run(clock.now_s + Random(seed).uniform(0.0, _STEP_S))
        lost_s, had = clock.now_s, {name: len(tokens_s[name]) for name in names}
        require(all(proxy.streams[name].outcome == "" for name in names), f"{way}: streams ended")
        proxy.recoveries.clear()
        ranks.lose([RANKS - 1], memory_kept=way == ORACLE)
        run_until(clock, lambda: ranks.serves, _FINE_S, _LONGEST_S)
        weights_s = clock.now_s - lost_s
        run_until(
            clock,
            lambda: all(len(tokens_s[name]) > had[name] + 1 for name in names),
            _FINE_S,
            _LONGEST_S,
        )
    # A token of the batch under way may have been on its way to the client.
    pauses_s = [
        max(after - before for before, after in pairwise([lost_s, *times_s[had[name] :]]))
        for name, times_s in tokens_s.items()
    ]
    taken = dict(proxy.recoveries)
    # Of a short pause the proxy may hear when it is over.
    require(set(taken) <= {Option.IN_PLACE.value}, f"{way}: {taken}")
    return Row(way, weights_s, min(pauses_s), median(pauses_s), max(pauses_s))


def ladder_s() -> dict[str, float]:
    """The same by arithmetic alone, without scheduling: bytes of the rank that reads most, and
    prompts one after another.
    """
    model = SHAPES[MODEL].units()
    before = even(model, RANKS)
    after = on_demand.reshaped(before, model, on_demand.survivors(before, [RANKS - 1]))
    kv_bytes = REQUESTS * CONTEXT_TOKENS * catalog.profile(PROFILE).geometry.bytes_per_token
    per_head = kv_bytes // (model.layers * len(model.attention_bytes))
    left, host_bytes_per_s = RANKS - 1, RATES.host_bytes_per_s
    speed = Speed(_degree(RANKS), _degree(KIN_RANKS))
    recompute_s = REQUESTS * speed.prefill_s(shares(after, model), CONTEXT_TOKENS)
    missing = with_kv(plan(before, after, model, [RANKS - 1]), per_head, [RANKS - 1])
    return {
        "recompute": model.total_bytes // left / host_bytes_per_s + recompute_s,
        "host": (model.total_bytes + kv_bytes // RANKS) // left / host_bytes_per_s,
        "full": schedule(missing, RATES).makespan_s,
    }


def _degree(ranks: int) -> Degree:
    name = PROFILE.replace(f"tp{RANKS}", f"tp{ranks}")
    return Degree(ranks, catalog.decode_table(name), catalog.prefill_table(name))
