"""The agents of the configuration, and what this proxy knows of each. There are none when `backup.mode` is off."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvrs.ids import InstanceId, NodeId
from kvrs.policy.events import HolderUp
from kvrs.protocol.instance import AgentInfo, AgentReport
from kvrs.proxy.backends.agent import AgentBackend
from kvrs.proxy.instances import Health


@dataclass(slots=True, eq=False)
class KnownAgent:
    """One node's agent."""

    id: InstanceId
    node: NodeId
    backend: AgentBackend
    health: Health = Health.STARTING
    reason: str | None = None
    info: AgentInfo | None = None
    report: AgentReport | None = None  # The last one; none while it is not up.


class Agents:
    def __init__(self, backends: Mapping[InstanceId, tuple[NodeId, AgentBackend]]) -> None:
        self.known = {name: KnownAgent(name, node, backend) for name, (node, backend) in backends.items()}

    def is_up(self, agent: InstanceId) -> bool:
        return self.known[agent].health is Health.UP

    def fault(self, known: KnownAgent, info: AgentInfo) -> str | None:
        """Why an agent that answered cannot be used."""
        for what, wanted, got in (("id", known.id, info.id), ("node", known.node, info.node)):
            if wanted != got:
                return f"{what} is {str(got)!r}, the configuration says {str(wanted)!r}"
        return None

    def accept(self, known: KnownAgent, info: AgentInfo) -> HolderUp:
        """Note that the agent is used from now on; what the policy needs of it."""
        known.info = info
        known.report = None
        known.health = Health.UP
        known.reason = None
        return HolderUp(known.id, known.node, info.epoch, info.capacity_bytes, info.host_to_device_bytes_per_s)
