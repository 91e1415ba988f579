"""Section `transfer` of the configuration: how pages move."""

from pydantic import Field

from kvrs.config.settings import Settings


class LinkSettings(Settings):
    time_constant_s: float = Field(default=2.0, gt=0, le=600)
    """Time constant of the moving average: five of these after a step the estimate is within 1 % of
    the rate.
    """
    probe_s: float = Field(default=0.03, gt=0, le=1)
    """How long a probe takes by the estimate, with `probe_bytes` at least."""
    probe_share: float = Field(default=0.01, gt=0, le=0.5)
    """Largest part of a link's capacity that all probes over it take together."""
    drift: float = Field(default=0.01, ge=0, le=1)
    """Decisions count on the estimate less its spread, and less this share of it times the root of
    the seconds without a measurement.
    """
    least_share: float = Field(default=0.1, gt=0, le=1)
    """Lower bound of the bandwidth that decisions assume, as a share of the estimate."""


class TransferSettings(Settings):
    link_bytes_per_s: float | None = Field(default=None, gt=0)
    """Limit per link between two nodes. null: as fast as it goes. Within a node there is no limit.
    """
    stall_timeout_s: float = Field(default=2.0, gt=0, le=600)
    """A peer that sends nothing for this long is given up."""
    probe_interval_s: float = Field(default=2.0, gt=0, le=3600)
    """A link without traffic for this long is probed."""
    probe_bytes: int = Field(default=65536, ge=1024, le=1 << 24)
    """Smallest size of a probe."""
    link: LinkSettings = Field(default_factory=LinkSettings)
    """How the bandwidth between two nodes is estimated."""
    lease_s: float = Field(default=30.0, gt=0, le=3600)
    """How long prefill retains a hand-off without a renewal."""
