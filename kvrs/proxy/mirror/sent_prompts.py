"""Messages by which proxies, and the workers of one, tell each other what they have sent where."""

from collections.abc import Iterable

from kvrs.core.recovery import RecoveryPolicy
from kvrs.protocol.mirror import SentPrompt


class SentPrompts:
    """The prompts that go to each peer with the next message. A peer that has not taken the ones
    before them misses those.
    """

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._waiting: dict[str, list[SentPrompt]] = {}

    def gather(self, peers: Iterable[str]) -> bool:
        """Have these peers told of the prompts that were sent since the last call; return whether
        there are any.
        """
        if sent := self._policy.take_sent():
            self._waiting = dict.fromkeys(peers, sent)
        return bool(sent)

    def take(self, peer: str) -> list[SentPrompt]:
        """Return those for one peer."""
        return self._waiting.pop(peer, [])

    def heard(self, sent: list[SentPrompt]) -> None:
        """Note the prompts that a peer has sent."""
        self._policy.sent_elsewhere(sent)
