"""The front of a history whose back is fetched: vLLM computes it by a request of its own, beside
the decode call, which finds it in the prefix cache of the server.

The connector keeps the decode call waiting for it, and lets that go on without it if it fails. So
only what goes wrong with the decode call counts, and the front ends with it at the latest.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import KvrsParams
from kvrs.proxy.backends.bodies import BYTES_PER_ID, Call
from kvrs.proxy.wire.requests import COMPLETIONS

log = logging.getLogger(__name__)

# Fields that say whose KV it is, and when it is computed.
_KEPT = ("model", "cache_salt", "priority")


def front_of(call: Call, page_size_tokens: int) -> tuple[Call, KvrsParams] | None:
    """The call that computes what lies before the pages that a decode call names, and what the
    connector is to know of it; None: nothing lies before them.
    """
    params: KvrsParams | None = call.fields.get("kvrs")
    if params is None or not params.sources or not params.sources[0].first_page:
        return None
    history: Any = params.token_ids or call.fields.get("prompt")
    if not isinstance(history, array | list):
        return None
    tokens = params.sources[0].first_page * page_size_tokens
    fields = {name: call.fields[name] for name in _KEPT if name in call.fields}
    fields |= {"prompt": history[:tokens], "max_tokens": 1, "temperature": 0, "stream": False}
    own = KvrsParams(
        params.stream, params.attempt, params.prompt_tokens, owner_epoch=params.owner_epoch
    )
    return Call(COMPLETIONS.path, fields, size_bytes=BYTES_PER_ID * tokens), own


_Compute = Callable[[], Coroutine[Any, Any, bytes]]


async def decode_behind(
    compute: _Compute, decoded: Coroutine[Any, Any, None], instance: InstanceId
) -> None:
    """Carry a decode call out while the front of its history is computed."""
    computed = asyncio.create_task(_computed(compute, instance))
    del compute
    try:
        await decoded
    finally:
        computed.cancel()
        await asyncio.wait([computed])
    if not computed.cancelled():
        computed.result()  # A bug.


async def _computed(compute: _Compute, instance: InstanceId) -> None:
    try:
        await compute()
    except KvrsError as error:
        extra = {"instance": instance, "cause": str(error)}
        log.warning("the front of a history was not computed", extra=extra)
