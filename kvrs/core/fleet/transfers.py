"""Judgement of engines by what they do with the KV pages of a request that is aborted while its KV
moves.

SGLang's prefill writes into pages of decode. From 0.5.23 on decode keeps the pages of an aborted
request until prefill has stopped, at most 30 s, unless the environment says otherwise; earlier
versions give them to others at once. vLLM's decode reads, and keeps the pages until the read is
over; before 0.32 not until the last of several reads, which prefill and decode of unequal tensor
parallelism have.
"""

import re
from collections.abc import Collection

import msgspec

from kvrs.config.cluster import Backend
from kvrs.protocol.rows import SGLANG_VARIABLE

# First versions that keep the pages by default.
_SGLANG_SINCE = (0, 5, 23)
_VLLM_SINCE = (0, 32, 0)
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")


class AbortedTransfers(msgspec.Struct, frozen=True):
    """`are_held`: pages of aborted transfers are kept until nothing writes them; None: not known.
    `cause`: why they are not, or may not be.
    """

    are_held: bool | None
    cause: str = ""


def aborted_transfers(
    engine: Backend, version: str | None, *, shown: bool | None, ranks: Collection[int | None]
) -> AbortedTransfers | None:
    """Judge an instance to or from which KV moves; None: an engine of which nothing is known to be
    wrong. `shown`: what kvrs's plug-in sees in the process, None if it is not there. `ranks`:
    tensor-parallel ranks of each instance, None where they are not known.
    """
    if engine not in (Backend.SGLANG, Backend.VLLM):
        return None
    since = _SGLANG_SINCE if engine is Backend.SGLANG else _VLLM_SINCE
    wanted = ".".join(map(str, since))
    if shown is not None:
        cause = f"{SGLANG_VARIABLE} is off in its environment"
        return AbortedTransfers(shown, "" if shown else cause)
    found = _VERSION.match(version or "")
    if found is None:
        cause = f"its version is {version or 'not known'}; needed: {wanted} or later"
        return AbortedTransfers(None, cause)
    if tuple(int(part or 0) for part in found.groups()) >= since:
        return AbortedTransfers(True)
    cause = f"its version is {version}; needed: {wanted} or later"
    if engine is Backend.SGLANG:
        return AbortedTransfers(False, cause)
    if None in ranks:
        return AbortedTransfers(None, f"{cause}, or equal tensor parallelism, which is not known")
    if len(set(ranks)) > 1:
        return AbortedTransfers(False, f"{cause}, or equal tensor parallelism at all instances")
    return AbortedTransfers(True)
