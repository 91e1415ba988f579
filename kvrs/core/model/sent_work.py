"""The work that this proxy has sent to instances and that they have not answered yet."""

from kvrs.core.model.member import Member
from kvrs.ids import NodeId

_MOST_WEIGHT = 8.0  # Limit of the weight of compute time relative to queue time.


class SentWork:
    """Books the predicted compute time of unanswered requests at their instances."""

    def __init__(self, changed: dict[NodeId, None]) -> None:
        self._changed = changed  # Nodes with an instance whose work has changed.
        self._prompts = 0  # Unanswered prompts of this proxy at prefill instances.
        self._reported_prompts = 0  # Prompts of all proxies at prefill instances.

    def book(self, member: Member, seconds: float) -> None:
        member.work_s += seconds
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self._changed[member.node] = None
        member.bookings += 1
        self._prompts += member.prefills

    def unbook(self, member: Member, seconds: float) -> None:
        member.bookings -= 1
        self._prompts -= member.prefills
        # Idle instances must have exactly zero: a rounding error would decide between them.
        member.work_s = max(0.0, member.work_s - seconds) if member.bookings else 0.0
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self._changed[member.node] = None

    def note_prompts(self, member: Member, prompts: int) -> None:
        """Note the number of prompts that a prefill instance runs or queues by its report."""
        self._reported_prompts += prompts - member.reported_prompts
        member.reported_prompts = prompts

    def prompt_weight(self, prefillers: int) -> float:
        """Return the cost of a second of compute time: 1 for the prompt itself, plus 1 for each
        prompt behind it, which is the number of prompts in flight per prefill instance.
        """
        prompts = max(self._prompts, self._reported_prompts)
        return min(_MOST_WEIGHT, 1 + prompts / max(1, prefillers))
