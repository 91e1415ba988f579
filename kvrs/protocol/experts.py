"""Facts about the experts of an instance of several ranks."""

from typing import Annotated

import msgspec

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ExpertReport(msgspec.Struct, frozen=True):
    """Load and copies of a mixture of experts on several ranks, in load reports."""

    count: _Natural  # Experts per layer that has experts.
    copies: _Natural  # Units of experts that ranks hold beside their owners.
    # Load of the busiest rank over the mean load, from the latest choices; 1.0: not known yet.
    skew: Annotated[float, msgspec.Meta(ge=1)]
    tiles: list[_Natural]  # Tiles of 16 rows of a unit that each rank has computed since the start.
    rebalances: _Natural  # Changes of the set of copies since the start.
    copied_bytes: _Natural  # Bytes of weights copied by `rebalances`.
    reason: str = ""  # Reason why no more copies are made although they would help.
