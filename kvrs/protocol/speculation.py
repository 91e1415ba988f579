"""Speculation on the wire: counts of an instance, and the notice of one that starts again."""

from typing import Annotated

import msgspec

from kvrs.ids import InstanceId

_Natural = Annotated[int, msgspec.Meta(ge=0)]

MOST_RELOAD_S = 60.0


class SpeculationReport(msgspec.Struct, frozen=True):
    """Drafts of an instance; counts are since its start."""

    source: str
    active: bool = False  # Drafts are made now.
    steps: _Natural = 0  # With drafts, of a stream each.
    proposed: _Natural = 0
    accepted: _Natural = 0


class ReloadNotice(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/reload`: that instance is being started again, and serves nothing for
    so long, or until it says so again.
    """

    instance: InstanceId
    for_s: Annotated[float, msgspec.Meta(ge=0, le=MOST_RELOAD_S)]
