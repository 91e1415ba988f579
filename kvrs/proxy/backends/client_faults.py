"""Refusals of an engine that are final: they name a fault of the request, which every instance of
the model would find. Any other 4xx may be the fault of the instance, and another one is asked.
"""

import msgspec

_STATUSES = frozenset({400, 413, 422})
_CODES = frozenset({"context_length_exceeded", "invalid_prompt", "string_above_max_length"})
# Parameters that the proxy sets, or that depend on what an instance has loaded.
_NOT_THE_CLIENTS = ("kvrs", "kv_transfer_params", "model")
# vLLM says these without a code, and most versions without a parameter.
_MESSAGES = ("maximum context length", "maximum model length", "out of vocabulary")


def is_final(status: int, body: bytes) -> bool:
    """A refusal in OpenAI's form names a fault of the request itself: its length, or a field."""
    if status not in _STATUSES:
        return False
    match msgspec.json.decode(body):
        case {"error": {"code": str(code)}} if code in _CODES:
            return True
        case {"error": {"param": str(param)}} if param:
            return param.split(".")[0] not in _NOT_THE_CLIENTS
        case {"error": {"message": str(message)}}:
            return any(words in message for words in _MESSAGES)
        case _:
            return False
