"""Report on the experts of an instance that divides a mixture of experts among several ranks."""

from typing import Annotated

import msgspec

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ExpertReport(msgspec.Struct, frozen=True):
    """Load of a mixture of experts on several ranks, and the copies of experts that even the load
    out.
    """

    count: _Natural  # Number of experts in each layer that has experts.
    # Number of parts of experts (a whole expert, or one of its equal divisions, of one layer) that
    # are held a second time, on a rank that does not own them.
    copies: _Natural
    # Load of the busiest rank divided by the mean load of all, from the latest choices; 1.0: not
    # known yet.
    skew: Annotated[float, msgspec.Meta(ge=1)]
    # By rank: tiles (up to 16 tokens through one unit) that the rank has computed since the start.
    tiles: list[_Natural]
    # Changes of the set of copies since the start, each to even out the load.
    rebalances: _Natural
    copied_bytes: _Natural  # Bytes of weights that ranks have received in `rebalances`.
    # Reason why no more copies are made although they would help; empty: nothing prevents copies.
    reason: str = ""
