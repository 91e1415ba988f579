"""A shell of slots that notes what it is told to send, and sends nothing."""

from dataclasses import dataclass, field

from kvrs.core.books.at_agents import SlotOutcome
from kvrs.ids import InstanceId


@dataclass
class NotingShell:
    posted: list[InstanceId] = field(default_factory=list)  # Agents with a message to send.
    counted: list[SlotOutcome] = field(default_factory=list)

    def post_slots(self, agent: InstanceId) -> None:
        self.posted.append(agent)

    def count_slot(self, outcome: SlotOutcome) -> None:
        self.counted.append(outcome)
