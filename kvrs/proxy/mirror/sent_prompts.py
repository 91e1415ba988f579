"""Exchange of the prompts that were sent to instances, between proxies and between workers."""

from collections.abc import Iterable

from kvrs.core.recovery import RecoveryPolicy
from kvrs.protocol.mirror import SentPrompt


class SentPrompts:
    """Prompts that this proxy has sent to instances, for the next message to each peer. A missed
    message is not repeated.
    """

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._waiting: dict[str, list[SentPrompt]] = {}

    def gather(self, peers: Iterable[str]) -> bool:
        """Queue the prompts sent since the last call for these peers; return False if there were
        none.
        """
        if sent := self._policy.take_sent():
            self._waiting = dict.fromkeys(peers, sent)
        return bool(sent)

    def take(self, peer: str) -> list[SentPrompt]:
        """Return the queued prompts of a peer."""
        return self._waiting.pop(peer, [])

    def heard(self, sent: list[SentPrompt]) -> None:
        """Tell the policy of prompts that a peer has sent to instances."""
        self._policy.sent_elsewhere(sent)
