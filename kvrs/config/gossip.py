"""Section `gossip` of the configuration."""

from pydantic import Field

from kvrs.config.settings import Settings


class GossipSettings(Settings):
    """Settings of SWIM with Lifeguard; all else is constant."""

    enabled: bool = False
    """Agents and proxies are members, at `cluster.nodes[].agent.gossip_port` and
    `proxy.gossip_port`. Each node then needs an agent, whatever `backup.mode` is.
    """
    probe_interval_s: float = Field(default=0.5, ge=0.05, le=60)
    """One member is probed per interval, by up to three pings, and suspected if it has not answered
    by the end of the interval. All other intervals of gossip are multiples of it. 2.5 suits round
    trips of up to half a second.
    """
