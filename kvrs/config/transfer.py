"""Section `transfer` of the configuration: how pages move."""

from pydantic import Field

from kvrs.config.settings import Settings


class TransferSettings(Settings):
    link_bytes_per_s: float | None = Field(default=None, gt=0)
    """Limit per link between two nodes; transfers within a node have none. null: no limit."""
    stall_timeout_s: float = Field(default=2.0, gt=0, le=600)
    """A peer that sends nothing for this long is given up."""
    probe_interval_s: float = Field(default=2.0, gt=0, le=3600)
    """A link without traffic for this long is probed."""
    lease_s: float = Field(default=30.0, gt=0, le=3600)
    """Time for which prefill retains a hand-off without a renewal."""
