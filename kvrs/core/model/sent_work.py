"""The work that this proxy has sent to instances and that has no answer yet."""

from kvrs.core.model.member import Member
from kvrs.ids import NodeId

_MOST_WEIGHT = 8.0  # Of computing beside queueing.


class SentWork:
    """Predicted compute time of requests without an answer, and at which instances."""

    def __init__(self, changed: dict[NodeId, None]) -> None:
        self._changed = changed  # Nodes of whose instances the work has.
        self._prompts = 0  # Of them, those at prefill instances.
        self._reported_prompts = 0  # At prefill instances, of all proxies.

    def book(self, member: Member, seconds: float) -> None:
        member.work_s += seconds
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self._changed[member.node] = None
        member.bookings += 1
        self._prompts += member.prefills

    def unbook(self, member: Member, seconds: float) -> None:
        member.bookings -= 1
        self._prompts -= member.prefills
        # Without bookings exactly zero: a rounding error would decide between idle instances.
        member.work_s = max(0.0, member.work_s - seconds) if member.bookings else 0.0
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self._changed[member.node] = None

    def note_prompts(self, member: Member, prompts: int) -> None:
        """Note how many prompts a prefill instance runs or queues by its report."""
        self._reported_prompts += prompts - member.reported_prompts
        member.reported_prompts = prompts

    def prompt_weight(self, prefillers: int) -> float:
        """The cost of a second of computing, in seconds: one of the prompt itself, and one of each
        prompt behind it, of which there are as many as are in flight per prefill instance.
        """
        prompts = max(self._prompts, self._reported_prompts)
        return min(_MOST_WEIGHT, 1 + prompts / max(1, prefillers))
