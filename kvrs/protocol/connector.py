"""The `kvrs` object of vLLM's `kv_transfer_params`, which a proxy sends to the kvrs connector.

Clients reach vLLM's port as well, and a claim on a checkpoint drops the claims below it at the
agents. So the object is a text with a mac under the instance's key of the cluster's secret.
"""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated

import msgspec

from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import KvrsParams
from kvrs.protocol.secrets import Scope, derive, scoped_key

FIELD = "kvrs"  # In `kv_transfer_params`.
STAGING_BYTES = 128 << 20  # Of the connector, where its option does not say otherwise.
_LEAST_STAGED = 2  # Pages: one that is fetched beside one that is saved.
_MAX_CHARACTERS = 1 << 16


class SealedParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """JSON of `KvrsParams`, and the HMAC-SHA256 of its bytes in hexadecimal."""

    params: Annotated[str, msgspec.Meta(max_length=_MAX_CHARACTERS)]
    mac: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


def staging_pages(staging_bytes: int, page_bytes: int) -> int:
    """Pages for which the connector's staging memory has room."""
    return max(_LEAST_STAGED, staging_bytes // page_bytes)


def connector_key(secret: bytes, instance: InstanceId) -> bytes:
    """The key under which parameters for the connector of one instance are sealed."""
    return derive(scoped_key(secret, Scope.INSTANCE, instance).key, b"kv_transfer_params")


def seal(params: KvrsParams, key: bytes) -> SealedParams:
    text = msgspec.json.encode(params)
    return SealedParams(text.decode(), hmac.digest(key, text, sha256).hex())


def unseal(value: object, keys: Iterable[bytes]) -> KvrsParams:
    """The parameters in a value that came with a request.

    Raises:
        RequestError: it is no such object, its mac is under none of the keys, or a field is wrong.
    """
    place = f"kv_transfer_params.{FIELD}"
    try:
        sealed = msgspec.convert(value, SealedParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"{place}: {error}", param=place) from None
    text = sealed.params.encode(errors="replace")
    mac = sealed.mac.encode(errors="replace")
    macs = [hmac.digest(key, text, sha256).hex().encode() for key in keys]
    if not any(hmac.compare_digest(mac, each) for each in macs):
        raise RequestError(
            f"{place}: its mac is wrong; allowed: one under the cluster's secret", param=place
        )
    try:
        return msgspec.json.decode(text, type=KvrsParams)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{place}: {error}", param=place) from None
