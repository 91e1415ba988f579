"""Facts about the experts of an instance of several ranks."""

from typing import Annotated

import msgspec

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ExpertReport(msgspec.Struct, frozen=True):
    """A mixture of experts on the ranks of one instance, in its load reports."""

    count: _Natural  # Of each layer that has some.
    copies: _Natural  # Of units of experts, beside those that their owners have.
    # Load of the rank with most to do over that of the mean one, layer by layer, for the experts
    # that were chosen lately; 1.0 as long as that is not known.
    skew: Annotated[float, msgspec.Meta(ge=1)]
    tiles: list[_Natural]  # Of 16 rows of a unit, that each rank has computed since the start.
    rebalances: _Natural  # Changes of copies since the start.
    copied_bytes: _Natural  # Weights that these have brought to ranks.
    reason: str = ""  # Why there are no more copies, although these would help.
