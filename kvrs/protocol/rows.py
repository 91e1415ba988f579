"""Frames of the row port: servers load rows of engines' host memory from an agent, by key.

Both ends have proved the cluster's secret (`secrets.py`) before the first frame. A client asks and
the agent answers, one question at a time:

    question   answer
    REGION     HELD, once the agent has mapped what comes with it: descriptors of a region and of
               its ledger. The connection stays open as long as the engine lives
    SPACE      HELD: from here on keys are of this namespace and rows of this size
    LOOKUP     FOUND and a byte for each key: 1 where its row is held
    LOAD       For each key in order, ROW with its tag and its bytes, or GONE. A client of the
               same node gets CHECKED for rows of the node's engines, with a checksum in place of
               the tag
    PROTECTED  KEYS with the rows that running streams need, for each namespace that has such rows,
               then HELD. From here on, loads of this connection wait for those of all others
    any        REFUSED and the reason, and the end

A frame is a header (magic, type, bytes of a key, number of keys, bytes of what follows them), the
keys, and the rest. All lengths are compared with bounds before memory is allocated for them.

The tag of a row is a MAC (`transfer/rows/tags.py`). Other frames have no MAC: changing them on the
way can only cause a prompt to be computed again.

The `kvrs` object in `kv_transfer_params` of a request to vLLM: a proxy tells the server to keep
the request's rows, and at which agents to look for them.

Clients may reach vLLM's own port, too. So the object has a MAC under a key of the server, derived
from the cluster's secret. A captured object is valid only at the same server, for some minutes, and
for the same agents.
"""

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum
from hashlib import sha256
from typing import Annotated, Any, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from kvrs.errors import RequestError, TransferError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.secrets import Scope, derive, scoped_key

NAMESPACE_BYTES = 32
MAX_KEY_BYTES = 55
MAX_KEYS = 1 << 16
MAX_ROW_BYTES = 1 << 30
MAX_ABOUT_BYTES = 1 << 16
MAX_REASON_BYTES = 512
CHECKSUM_BYTES = 16
MAX_REGIONS = 64  # Most regions of one node; an engine has one for each data-parallel rank.

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_MAGIC = b"KR"
_HEAD = struct.Struct("!2sBBIQ")
_SPACE = struct.Struct(f"!{NAMESPACE_BYTES}sQ")
HEAD_BYTES = _HEAD.size
TAG_BYTES = 40  # Bytes of the tag of a row (`transfer/rows/tags.py`).


class RowFrame(IntEnum):
    REGION = 1
    HELD = 2
    SPACE = 3
    LOOKUP = 4
    FOUND = 5
    LOAD = 6
    ROW = 7
    GONE = 8
    REFUSED = 9
    PROTECTED = 10
    KEYS = 11
    CHECKED = 12


# Bytes of the tag or checksum that precedes a row in each answer.
BYTES_BEFORE_ROW = {RowFrame.ROW: TAG_BYTES, RowFrame.CHECKED: CHECKSUM_BYTES}
_MAX_BODY_BYTES = {
    RowFrame.REGION: MAX_ABOUT_BYTES,
    RowFrame.HELD: 0,
    RowFrame.SPACE: _SPACE.size,
    RowFrame.LOOKUP: 0,
    RowFrame.FOUND: MAX_KEYS,
    RowFrame.LOAD: 0,
    RowFrame.GONE: 0,
    RowFrame.REFUSED: MAX_REASON_BYTES,
    RowFrame.PROTECTED: 0,
    RowFrame.KEYS: _SPACE.size,
    **{frame: size + MAX_ROW_BYTES for frame, size in BYTES_BEFORE_ROW.items()},
}
_WITH_KEYS = {RowFrame.LOOKUP, RowFrame.LOAD, RowFrame.KEYS}


class Space(NamedTuple):
    """Namespace and size of rows: equal keys in equal spaces name equal rows."""

    namespace: bytes
    row_bytes: int


# Field of `RegionInfo.fields`, not a part of the namespace: whether the engine keeps the pages of a
# request that is aborted while its KV moves.
HOLDS_ABORTED = "holds_aborted_transfers"
# Environment variable by which SGLang keeps these pages.
SGLANG_VARIABLE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"


class RegionInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about a region, sent together with its descriptors."""

    engine: _Name
    namespace: bytes
    rows: int
    row_bytes: int
    # Values that the namespace is a hash of, to show in what two namespaces differ.
    fields: dict[str, Any]
    model: str = ""  # Model name as the engine serves it.
    row_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0  # Tokens in one row; 0: not reported.

    @property
    def space(self) -> Space:
        return Space(self.namespace, self.row_bytes)

    @property
    def weights(self) -> str:
        """The digest of the engine's weights; empty: it is none that a report may have."""
        found = self.fields.get("weights")
        return found if isinstance(found, str) and len(found) <= 64 else ""

    @property
    def holds_aborted(self) -> bool | None:
        """Return whether the engine keeps pages of aborted transfers; None: not reported."""
        found = self.fields.get(HOLDS_ABORTED)
        return found if isinstance(found, bool) else None


# First 16 hex digits of a namespace; engines of one namespace can use each other's rows.
ShortSpace = Annotated[str, msgspec.Meta(min_length=16, max_length=16)]


def short(namespace: bytes) -> ShortSpace:
    return namespace.hex()[:16]


# Digest of a model's weights, code and configuration (`kvrs/engines/fingerprint.py`).
Digest = Annotated[str, msgspec.Meta(max_length=64)]


class RegionReport(msgspec.Struct, frozen=True):
    """The rows of one engine, in the report of the agent of its node."""

    engine: InstanceId
    namespace: ShortSpace
    is_alive: bool
    rows: Annotated[int, msgspec.Meta(ge=0)]
    row_bytes: Annotated[int, msgspec.Meta(ge=0)]
    row_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0  # Tokens per row; 0: not reported.
    weights: Digest = ""  # Digest of the engine's weights; empty: not known.
    # True if the engine keeps pages of aborted transfers; None: not reported.
    holds_aborted: bool | None = None
    # Complete rows without a checksum when the engine died; 0 while it lives.
    unchecked_rows: Annotated[int, msgspec.Meta(ge=0)] = 0

    @classmethod
    def of(cls, info: RegionInfo, *, is_alive: bool, unchecked_rows: int = 0) -> "RegionReport":
        return cls(
            InstanceId(info.engine),
            short(info.namespace),
            is_alive,
            info.rows,
            info.row_bytes,
            info.row_tokens,
            info.weights,
            info.holds_aborted,
            unchecked_rows,
        )


class CopyReport(msgspec.Struct, frozen=True):
    """The second copies of one other node's rows, in the report of the agent that keeps them."""

    node: Annotated[NodeId, msgspec.Meta(min_length=1, max_length=128)]  # Node of the engines.
    namespace: ShortSpace
    # Part of the rows that running streams of that node need, by the agent's last look there,
    # rounded down to a tenth: a report that changes with each row would be told each time.
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]


class RowsReport(msgspec.Struct, frozen=True):
    """All rows of vLLM's CPU tiers that an agent serves, as reported to proxies. An agent of a
    version without `copied` is taken to have no copies.
    """

    regions: Annotated[tuple[RegionReport, ...], msgspec.Meta(max_length=MAX_REGIONS)] = ()
    to_other_nodes: bool = False  # True if the agent serves the rows to servers of other nodes too.
    copied: Annotated[tuple[CopyReport, ...], msgspec.Meta(max_length=MAX_REGIONS)] = ()
    # Rows and copies that differed from their checksums, since the agent's start.
    refused_rows: Annotated[int, msgspec.Meta(ge=0)] = 0


NO_ROWS = RowsReport()


class RowHead(msgspec.Struct, frozen=True):
    frame: RowFrame
    key_bytes: int
    keys: int
    body_bytes: int

    @property
    def keys_bytes(self) -> int:
        return self.key_bytes * self.keys


def encode(frame: RowFrame, keys: Sequence[bytes] = (), body: bytes = b"") -> bytes:
    """Encode a frame with keys of equal length. For a row use `row_start`, behind which the row is
    sent.
    """
    key_bytes = len(keys[0]) if keys else 0
    assert all(len(key) == key_bytes for key in keys)
    return b"".join((_HEAD.pack(_MAGIC, frame, key_bytes, len(keys), len(body)), *keys, body))


def decode_head(head: bytes | bytearray | memoryview) -> RowHead:
    """Decode the start of a frame. Raises TransferError: not a frame, or too long."""
    magic, kind, key_bytes, keys, body_bytes = _HEAD.unpack(head)
    if magic != _MAGIC or kind not in _MAX_BODY_BYTES:
        raise TransferError(f"row port: frame {magic!r} {kind}; allowed: {_MAGIC!r} 1 to 12")
    frame = RowFrame(kind)
    if body_bytes > (most := _MAX_BODY_BYTES[frame]):
        raise TransferError(f"row port: {frame.name} of {body_bytes} bytes; allowed: {most}")
    with_keys = frame in _WITH_KEYS
    if keys > (MAX_KEYS if with_keys else 0) or bool(key_bytes) != bool(keys):
        raise TransferError(f"row port: {frame.name} with {keys} keys of {key_bytes} bytes")
    if key_bytes > MAX_KEY_BYTES:
        raise TransferError(f"row port: keys of {key_bytes} bytes; allowed: {MAX_KEY_BYTES}")
    return RowHead(frame, key_bytes, keys, body_bytes)


def split_keys(data: bytes, key_bytes: int) -> list[bytes]:
    return [data[at : at + key_bytes] for at in range(0, len(data), key_bytes or 1)]


def encode_space(space: Space) -> bytes:
    return _SPACE.pack(*space)


def decode_space(body: bytes) -> Space:
    """Decode the body of a SPACE frame. Raises TransferError: it is malformed."""
    if len(body) != _SPACE.size:
        raise TransferError(f"row port: SPACE of {len(body)} bytes; allowed: {_SPACE.size}")
    space = Space(*_SPACE.unpack(body))
    if not 0 < space.row_bytes <= MAX_ROW_BYTES:
        raise TransferError(
            f"row port: rows of {space.row_bytes} bytes; allowed: 1 to {MAX_ROW_BYTES}"
        )
    return space


def row_start(row_bytes: int, tag: bytes, frame: RowFrame = RowFrame.ROW) -> bytes:
    """Encode the head that is sent before the bytes of a row."""
    return _HEAD.pack(_MAGIC, frame, 0, 0, len(tag) + row_bytes) + tag


def checksum(row: bytearray | memoryview) -> bytes:
    return xxh3_128_digest(row)


def decode_region(body: bytes) -> RegionInfo:
    """Decode the facts in a REGION frame. Raises TransferError: they are malformed."""
    try:
        info = msgspec.json.decode(body, type=RegionInfo)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"row port: REGION: {error}") from None
    if len(info.namespace) != NAMESPACE_BYTES or not 0 < info.row_bytes <= MAX_ROW_BYTES:
        raise TransferError(
            f"row port: REGION with a namespace of {len(info.namespace)} bytes and rows of "
            f"{info.row_bytes}; allowed: {NAMESPACE_BYTES}, at most {MAX_ROW_BYTES}"
        )
    return info


def encode_region(info: RegionInfo) -> bytes:
    return encode(RowFrame.REGION, body=msgspec.json.encode(info))


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
