"""Test of a vLLM server for replay: only its output shows that it has the logits processor of
`kvrs/vllm/replay.py`.
"""

from collections.abc import Awaitable, Callable

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import REPLAY_KEY, Capability, InstanceInfo, Role
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.wire.upstream import EventReader, Reader

# Known output of the test request: ids that every vocabulary has, in an order that no model
# generates by itself.
_KNOWN = [3, 1, 2, 1, 3]


async def with_replay(
    info: InstanceInfo, decode: Callable[[Call, Reader], Awaitable[None]]
) -> InstanceInfo:
    """Return `info`, with the capability REPLAY if the server repeats known output. A server that
    refuses the test request or fails at it lacks only this capability; a dead server is found
    elsewhere.
    """
    if info.role is Role.PREFILL:
        return info
    fields = {
        "model": info.model,
        "prompt": [1],
        "max_tokens": len(_KNOWN),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "vllm_xargs": {REPLAY_KEY: _KNOWN},
    }
    events = EventReader()
    try:
        await decode(Call("/v1/completions", fields), events)
        payloads = [payload for payload in events.payloads if payload != b"[DONE]"]
        choices = [each for data in payloads for each in CHUNK.decode(data).choices or ()]
    except (RefusedError, UpstreamError, *UNREADABLE):
        return info
    if [token for each in choices for token in each.token_ids or ()] != _KNOWN:
        return info
    return msgspec.structs.replace(info, capabilities=[*info.capabilities, Capability.REPLAY])
