"""Cells and units of the ranks of simulated instances, and the times of ranks and hosts."""

from dataclasses import dataclass

from kvrs_engine.elastic.experts import Tiles
from kvrs_engine.elastic.moving import LinkRates
from kvrs_engine.elastic.units import Units

# Few units, of the bytes that a model of that size has in all.
_UNITS = Units(
    layers=4,
    attention_bytes=(200_000_000,) * 6,
    mlp_bytes=(250_000_000,) * 12,
    vocabulary_bytes=(50_000_000,) * 8,
    common_bytes=100_000_000,
)
_RATES = LinkRates(host_bytes_per_s=25e9, peer_bytes_per_s=100e9)


@dataclass(frozen=True, slots=True)
class RankModel:
    units: Units = _UNITS
    rates: LinkRates = _RATES
    join_s: float = 0.02  # Until ranks that have their units compute together.
    restart_s: float = 0.15  # Of the process of a rank.
    grows_after_s: float = 1.5  # A rank that was lost is offered again.
    # Tiles of each expert by layer, where `units` have experts: how often each is chosen.
    tiles: Tiles = ()
    balances_after_s: float | None = None  # A change of the ranks; None: experts get no copies.
    split: bool = False  # Each rank has parts of every expert.
    copy_room: float = 0.5  # For copies, as a part of a rank's own weights.


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """Times of instances with a host for each stage."""

    load_s: float = 10.0  # Of a host.
    session_s: float = 0.1  # Until a host that is there computes for an instance that asks it.
    ask_again_s: float = 1.0  # Between two rounds of questions to donors.
    # Of the time in which a stage has a batch: its host computes. The rest is on the way.
    computing_share: float = 1.0
