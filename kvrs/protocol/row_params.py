"""The `kvrs` object in `kv_transfer_params` of a request to vLLM: a proxy tells the server to keep
the request's rows, and at which agents to look for them.

Clients may reach vLLM's own port, too. So the object has a MAC under a key of the server, derived
from the cluster's secret. A captured object is valid only at the same server, for some minutes, and
for the same agents.
"""

import hmac
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated

import msgspec

from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.protocol.secrets import Scope, derive, scoped_key

PARAMS_FIELD = "kvrs"
MAX_AGENTS = 16
# Seconds for which an object is valid: enough for differing clocks and a request's wait at the
# server.
GOOD_S = 900.0

_Agent = Annotated[str, msgspec.Meta(max_length=256)]


class RowParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`agents`: ids of agents beside the server's own. `made_s`: Unix time. `mac`: HMAC-SHA256 in
    hexadecimal.
    """

    agents: Annotated[list[_Agent], msgspec.Meta(max_length=MAX_AGENTS)]
    made_s: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    mac: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


def params_key(secret: bytes, instance: InstanceId) -> bytes:
    return derive(scoped_key(secret, Scope.INSTANCE, instance).key, b"kv_transfer_params")


def seal(agents: Sequence[str], key: bytes, now_s: float) -> RowParams:
    made_s = int(now_s)
    return RowParams([*agents], made_s, _mac(agents, made_s, key))


def unseal(value: object, keys: Sequence[bytes], now_s: float) -> list[str]:
    """Return the agents that a request's object names. `keys`: one for each secret of the cluster.

    Raises:
        RequestError: no such object, a MAC under none of the keys, or an object that is too old.
    """
    try:
        params = msgspec.convert(value, RowParams)
        macs = [_mac(params.agents, params.made_s, key) for key in keys]
        mac = params.mac.encode()
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise RequestError("it is malformed") from None
    if not any(hmac.compare_digest(mac, each.encode()) for each in macs):
        raise RequestError("its mac matches no secret of this cluster")
    if abs(now_s - params.made_s) > GOOD_S:
        raise RequestError(f"it was made more than {GOOD_S:g} s before or after this clock")
    return params.agents


def _mac(agents: Sequence[str], made_s: int, key: bytes) -> str:
    return hmac.digest(key, msgspec.json.encode((made_s, agents)), sha256).hex()
