"""Hand-offs of vLLM over NIXL, as a server reports them.

`hand_off_format` of an instance is a kind and a value. NIXL refuses hand-offs between two values of
one kind; values of two kinds cannot be compared.
"""

from typing import Annotated

import msgspec

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class HandOffReport(msgspec.Struct, frozen=True):
    """Counts of NIXL in vLLM, since its start."""

    transfers: _Natural = 0  # Reads by its ranks that were whole.
    transferred_bytes: _Natural = 0
    failed_transfers: _Natural = 0  # Hand-shakes and notices included.
    failed_notices: _Natural = 0  # To prefill, that its blocks were read.
    expired: _Natural = 0  # At prefill: leases that ended before decode had read the blocks.
    # At prefill: notices behind the end of the lease. What was read may have been other KV.
    late_notices: _Natural = 0
