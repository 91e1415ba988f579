"""Cells and units of the ranks of simulated instances, and the times of ranks and hosts."""

from dataclasses import dataclass

from kvrs_engine.elastic.experts import Tiles
from kvrs_engine.elastic.moving import LinkRates
from kvrs_engine.elastic.units import Units

# Few units, with the total bytes of a model of that size.
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
    join_s: float = 0.02  # From the last unit's arrival until the ranks compute together.
    restart_s: float = 0.15  # Restart of a rank's process.
    grows_after_s: float = 1.5  # Delay until a lost rank is offered again.
    # How often each expert is chosen, by layer, if `units` have experts.
    tiles: Tiles = ()
    balances_after_s: float | None = None  # After a change of ranks; None: no copies of experts.
    split: bool = False  # Each rank has parts of every expert.
    copy_room: float = 0.5  # Room for copies, as a share of a rank's own weights.


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """Times of instances with a host for each stage."""

    load_s: float = 10.0  # Restart of a host.
    session_s: float = 0.1  # Start of a session with a running host.
    ask_again_s: float = 1.0  # Interval between rounds of requests to donors.
    # Share of a stage's time in which its host computes; the rest is communication.
    computing_share: float = 1.0
