"""Counts of vLLM's hand-offs over NIXL, as a server reports them.

`hand_off_format` of an instance is a kind and a value. NIXL refuses hand-offs between two values of
one kind; values of two kinds cannot be compared.
"""

from typing import Annotated

import msgspec

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class HandOffReport(msgspec.Struct, frozen=True):
    """NIXL's counts in vLLM since its start."""

    transfers: _Natural = 0  # Reads of a whole hand-off that the server's ranks have completed.
    transferred_bytes: _Natural = 0
    failed_transfers: _Natural = 0  # Failed reads, hand-shakes and notices, added.
    # Failed notices by which decode tells prefill that it has read the blocks.
    failed_notices: _Natural = 0
    # Hand-offs whose lease at prefill ended before decode had read the blocks.
    expired: _Natural = 0
    # Notices that reached prefill after the lease had ended: decode may have read other KV.
    late_notices: _Natural = 0
