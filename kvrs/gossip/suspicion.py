"""How long a node is suspected before it is declared dead, and how much a node trusts itself (Lifeguard, arXiv 1707.00788)."""

from math import log, log10

from kvrs.gossip.config import GossipSettings


class Suspicion:
    """Of one incarnation of one member.

    It lasts long while only one node says so, and the shorter the more others confirm it: a dead node is missed by all who
    ask it, while a lost packet, or a deaf accuser, has no witnesses. Nobody declares dead whom he has not himself failed to
    reach during this suspicion (`evidence`), whatever he was told.
    """

    __slots__ = ("asking", "evidence", "least_s", "most_s", "since_s", "wanted")

    def __init__(self, settings: GossipSettings, members: int, since_s: float) -> None:
        """`members`: how many there are, this node and the suspect counted in."""
        self.since_s = since_s
        self.least_s = settings.suspicion_mult * max(1.0, log10(members)) * settings.probe_interval_s
        self.most_s = self.least_s * settings.suspicion_max_mult
        self.wanted = max(0, min(settings.confirmations, members - 2))  # All but the suspect and the first accuser may confirm.
        self.evidence = False
        self.asking = False  # Its time is over, and this node is probing it to have evidence of its own.

    def ends_s(self, accusers: int) -> float:
        """The end, after `most - (most - least) * log(c + 1) / log(k + 1)` when c of k wanted nodes have confirmed it."""
        if self.wanted == 0:
            return self.since_s + self.least_s
        share = min(1.0, log(max(1, accusers)) / log(self.wanted + 1))
        return self.since_s + self.most_s - (self.most_s - self.least_s) * share


class Health:
    """0: trusts itself. A node whose own probes fail where others' do not, or who must refute, gives everybody more time."""

    __slots__ = ("_max", "score")

    def __init__(self, most: int) -> None:
        self.score = 0
        self._max = most

    def worsen(self, by: int) -> None:
        self.score = min(self._max, self.score + by)

    def improve(self) -> None:
        if self.score:
            self.score -= 1
