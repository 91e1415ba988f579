"""Section `state_plane` of the configuration: memory of weights and KV that outlives the processes
of instances.
"""

from pydantic import Field

from kvrs.config.settings import Settings


class StatePlaneSettings(Settings):
    enabled: bool = False
    """The agent of a node owns the memory of its instances' weights and KV, below
    `backup.directory`: a process that is started again finds both there, and the instances of a
    node share one copy of the weights. Only for the embedded engine on a CPU.
    """
    wait_s: float = Field(default=10.0, gt=0, le=600)
    """How long an instance that starts waits for its node's agent; then its memory is its own."""
    orphan_s: float = Field(default=60.0, gt=0, le=86400)
    """Memory that no process has used for this long is given back."""
