"""Wait limits for streams without a usable instance, and the error when they expire.

A new request waits `recovery.role_wait_s` where every instance of a role was lost: instances that
are started again are back within seconds, and beyond that a request that has begun nowhere is
better refused than kept silent. All others wait `recovery.wait_s`.
"""

from kvrs.config.policy import RecoverySettings
from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.streams import Stream
from kvrs.core.routing import missing_roles
from kvrs.protocol.instance import Role


class Waits:
    """Which roles have had an instance, and since when one is missing."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._roles_seen: set[Role] = set()
        self._missing: list[Role] = []  # As last seen,
        self._missing_since_s = 0.0  # and since when.

    def instance_up(self) -> None:
        self._roles_seen |= set(Role) - set(missing_roles(self._view))

    def longest(
        self, stream: Stream, settings: RecoverySettings, now_s: float
    ) -> tuple[float, float]:
        """How long a stream waits in seconds, and since when."""
        missing = missing_roles(self._view)
        if missing != self._missing:
            self._missing, self._missing_since_s = missing, now_s
        is_new = stream.is_fresh and not stream.attempt.number
        if is_new and missing and self._roles_seen.issuperset(missing):
            since_s = max(stream.waiting_since_s, self._missing_since_s)
            return min(settings.wait_s, settings.role_wait_s), since_s
        since_s = stream.waiting_since_s
        # The wait for a busy instance goes on while it is tried.
        if stream.recovery.busy_since_s is not None:
            since_s = min(since_s, stream.recovery.busy_since_s)
        return settings.wait_s, since_s

    def refusal(
        self, wait_s: float, next_try_in_s: float | None, *, held_back: bool
    ) -> act.StreamRefusal:
        """The refusal of a stream that has waited for `wait_s`. `next_try_in_s`: until the first
        busy instance may be tried again, None where none is busy; `held_back`: decode instances
        compute prompts, and none had room for its own.
        """
        missing = missing_roles(self._view)
        if held_back:
            message = (
                f"no prefill instance is up, and no decode instance had room for the prompt within "
                f"{wait_s:g} s"
            )
        elif next_try_in_s is None or missing:
            which = f"{missing[0].value} instance" if len(missing) == 1 else "instance"
            message = f"no {which} came up within {wait_s:g} s"
        else:
            message = f"every instance is busy; the stream waits for {wait_s:g} s at most"
            return act.StreamRefusal(act.Reason.BUSY, message, next_try_in_s)
        # Others have just waited in vain: a client that retries at once would, too.
        return act.StreamRefusal(act.Reason.NO_INSTANCE, message, min(wait_s, 30.0))
