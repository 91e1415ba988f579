"""Fields of vLLM's requests and answers beside OpenAI's: hand-offs, rows that outlive a server, and
replays of known output.

`kv_transfer_params` of vLLM's NixlConnector, checked field by field before they are forwarded to
a decode instance.

vLLM does not check them: with too few blocks its engine dies, and without a required field the
request hangs for ever. Parameters serve one attempt, and only in the first two thirds of their
lease: later vLLM may read blocks with other KV, without noticing.

Attribution of the rows that a vLLM server has loaded, by its counters, to recovered streams and
to prompts whose beginning an agent or the server's store already had.

vLLM counts the reads of all requests together. Reads until the streams' first tokens are divided
among the streams by what each could have loaded, at most that. For agents this is an upper bound if
other requests load rows at the same time. A store is asked for every prompt, so recoveries get what
remains after the other requests have all that they asked for. If it is then uncertain that anything
was loaded, nothing is reported.

Test of a vLLM server for replay: only its output shows that it has the logits processor of
`kvrs/vllm/replay.py`.
"""

from collections.abc import Awaitable, Callable
from math import nan
from typing import Annotated, Any, NamedTuple

import msgspec

from kvrs.errors import UpstreamError
from kvrs.ids import NodeId
from kvrs.protocol.instance import (
    MEMORY,
    PREFIX,
    REPLAY_KEY,
    Capability,
    FetchReport,
    InstanceInfo,
    LinkReport,
    Natural,
    Role,
)
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.pages import TrafficClass
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.backends.bodies import Call, RowLoad
from kvrs.proxy.backends.vllm_metrics import VllmMetrics
from kvrs.proxy.wire.errors import UnusableError
from kvrs.proxy.wire.upstream import EventReader, Reader
from kvrs.transfer.meter import FetchedHandOff, HandOffMeter, Pulled

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Host = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z._:-]{1,255}$")]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Blocks = Annotated[list[Natural], msgspec.Meta(min_length=1)]

# Longest value in bytes that a field of a later vLLM, unknown here, may have: longer or composed
# values are refused.
_LONGEST_VALUE_BYTES = 64


class Transfer(msgspec.Struct, omit_defaults=True):
    """Location of a history's KV, valid for one pull within `kv_lease_duration` (30 s)."""

    remote_block_ids: Annotated[
        list[_Blocks], msgspec.Meta(min_length=1)
    ]  # Block ids, as one list for each group of layers.
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Host
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tp_size: _Count
    do_remote_prefill: bool
    do_remote_decode: bool
    remote_num_tokens: Natural | None = None
    dcp_size: _Count | None = None
    pp_size: _Count | None = None
    remote_blocks_expiry_time: float | None = None
    transfer_mode: _Name | None = None
    remote_prefill_cached_tokens: Natural | None = None


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TRANSFER = msgspec.json.Decoder(Transfer)


def checked(raw: bytes, history_tokens: int, page_size_tokens: int) -> Transfer:
    """Decode parameters, and check that they belong to this history.

    Raises:
        UnusableError: a field is missing or wrong; the message names it.
    """
    try:
        fields, transfer = _FIELDS.decode(raw), _TRANSFER.decode(raw)
    except UNREADABLE as error:
        raise UnusableError(
            f"prefill answered with kv_transfer_params that cannot be used: {error}"
        ) from None
    if not transfer.do_remote_prefill or transfer.do_remote_decode:
        raise _wrong(
            "do_remote_prefill", transfer.do_remote_prefill, "true, with do_remote_decode false"
        )
    if transfer.transfer_mode not in (None, "pull"):
        raise _wrong("transfer_mode", repr(transfer.transfer_mode), "'pull', since decode fetches")
    if transfer.remote_num_tokens not in (None, history_tokens):
        raise _wrong(
            "remote_num_tokens",
            transfer.remote_num_tokens,
            f"{history_tokens}, the tokens of the history",
        )
    needed, given = -(-history_tokens // page_size_tokens), max(map(len, transfer.remote_block_ids))
    if given < needed:
        raise _wrong(
            "remote_block_ids", f"{given} blocks", f"{needed}, for {history_tokens} tokens"
        )
    for name in fields.keys() - set(Transfer.__struct_fields__):
        value = bytes(fields[name])
        if len(value) > _LONGEST_VALUE_BYTES or value[:1] in b"[{":
            raise _wrong(
                name,
                "a field that is not known",
                "a number, a truth value or a short string in such a field",
            )
    return transfer


def _wrong(name: str, got: Any, allowed: str) -> UnusableError:
    return UnusableError(
        f"prefill answered with kv_transfer_params whose {name} is {got}; allowed: {allowed}"
    )


# Seconds after the last first token until the counters are read as final: an engine may publish
# them a moment later.
_SETTLED_S = 0.5
_REPORTED_S = 5.0  # Seconds for which each load report repeats the report of a load.


class _Counts(NamedTuple):
    """Bytes loaded by one process since its start, tokens asked of a store (0 without), and seconds
    of loading.
    """

    size_bytes: float = 0.0
    asked_tokens: float = 0.0
    seconds: float = 0.0

    def since(self, before: "_Counts") -> "_Counts":
        return _Counts(*(max(0.0, new - old) for new, old in zip(self, before, strict=True)))

    def plus(self, more: "_Counts") -> "_Counts":
        return _Counts(*(one + other for one, other in zip(self, more, strict=True)))


class _Open(NamedTuple):
    load: RowLoad
    pull: FetchedHandOff


class RowLoads:
    """Loads of rows by one server, and the bandwidths that result for its links."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._meter = HandOffMeter()
        self._open: list[_Open] = []
        # Time at which all loads in `_open` were first seen to have ended; None: one has not ended,
        # or the list is empty.
        self._over_s: float | None = None
        # From the last read: start time of the process, whether it loads from a store, and its
        # counts.
        self._before: tuple[float | None, bool, _Counts] = nan, False, _Counts()
        self._came = _Counts()  # Growth of the counts while loads were open.
        self._recovery_bytes = self._prefix_bytes = 0.0
        self._of_store = Pulled(0.0, 0.0, 0.0)  # Sum of the loads from a store, for its bandwidth.
        self._reports: list[tuple[float, FetchReport]] = []

    def begin(self, load: RowLoad, page_bytes: int, now_s: float) -> None:
        source = MEMORY if load.node is None or load.node == self._node else load.node
        pull = FetchedHandOff(source, load.pages * page_bytes, 1, now_s)
        self._open.append(_Open(load, pull))
        self._meter.begins(pull)
        if load.in_store:
            self._meter.counted(self._of_store, now_s)
        self._over_s = None

    def read(self, metrics: VllmMetrics, bytes_per_token: int, now_s: float) -> list[FetchReport]:
        """Read the counters; return a report for each load whose result became known in the last
        seconds.
        """
        in_store = bool(metrics.store)
        if in_store:
            found = metrics.store_loads
            counts = _Counts(found.hits * bytes_per_token, found.queries, found.seconds or 0.0)
        else:
            size_bytes, seconds = metrics.rows_read
            counts = _Counts(size_bytes, 0.0, seconds)
        process = metrics.started_s
        *of, before = self._before
        self._before = process, in_store, counts
        came = counts.since(before) if of == [process, in_store] else _Counts()
        for load, pull in self._open:
            pull.over_s = load.over_s
        if not in_store:
            pulled = Pulled(counts.size_bytes, counts.size_bytes, counts.seconds)
            self._meter.counted(pulled, now_s, process)
        if self._open:
            self._came = self._came.plus(came)
        else:
            self._prefix_bytes += came.size_bytes
        if not all(pull.over_s is not None for _, pull in self._open):
            self._over_s = None
        elif self._over_s is None:
            self._over_s = now_s
        elif now_s - self._over_s >= _SETTLED_S:
            self._settle(in_store, bytes_per_token, now_s)
        self._reports = [each for each in self._reports if now_s - each[0] < _REPORTED_S]
        return [report for _, report in self._reports]

    @property
    def kv_bytes(self) -> dict[str, int]:
        """Bytes loaded for recoveries and for new prompts, since the proxy first met each
        process.
        """
        return {
            TrafficClass.RECOVERY.label: int(self._recovery_bytes),
            PREFIX: int(self._prefix_bytes),
        }

    def links(self, now_s: float) -> list[LinkReport]:
        found = self._meter.measurements(now_s)
        return [LinkReport(source, *measured) for source, measured in found.items()]

    def _settle(self, in_store: bool, bytes_per_token: int, now_s: float) -> None:
        came, wanted_bytes = self._came, sum(each.pull.size_bytes for each in self._open)
        share = min(1.0, came.size_bytes / wanted_bytes) if wanted_bytes else 0.0
        if in_store:
            share = self._settle_store(share, wanted_bytes, bytes_per_token, now_s)
        else:
            for load, pull in self._open:
                loaded = round(share * pull.size_bytes / bytes_per_token)
                self._report(load, loaded, max(0, load.history_tokens - loaded), now_s)
        self._recovery_bytes += share * wanted_bytes
        self._prefix_bytes += came.size_bytes - share * wanted_bytes
        self._open.clear()
        self._came, self._over_s = _Counts(), None

    def _settle_store(
        self, most: float, wanted_bytes: float, bytes_per_token: int, now_s: float
    ) -> float:
        """Report the open loads from a store, and return the share of the wanted rows that was
        certainly loaded; `most` is the share that can have been loaded.
        """
        came, own_tokens = self._came, sum(each.load.history_tokens for each in self._open)
        of_others_bytes = max(0.0, came.asked_tokens - own_tokens) * bytes_per_token
        certain_bytes = min(wanted_bytes, max(0.0, came.size_bytes - of_others_bytes))
        if most and not certain_bytes:
            return 0.0
        for load, *_ in self._open:
            part = load.history_tokens / own_tokens
            asked = round(part * min(own_tokens, came.asked_tokens))
            loaded = min(asked, round(part * certain_bytes / bytes_per_token))
            # Tokens that this load may have had count neither as loaded nor as computed.
            had = min(asked, round(part * most * wanted_bytes / bytes_per_token))
            self._report(load, loaded, asked - max(had, loaded), now_s)
        size_bytes, seconds = came.size_bytes, came.seconds
        # The store does not count time: add the times from each load's start to its first token.
        if not seconds:
            size_bytes = certain_bytes
            seconds = sum((load.over_s or now_s) - pull.began_s for load, pull in self._open)
        if certain_bytes:
            of = self._of_store
            self._of_store = Pulled(
                of.transfers + size_bytes, of.size_bytes + size_bytes, of.seconds + seconds
            )
        self._meter.counted(self._of_store, now_s)
        return certain_bytes / wanted_bytes if wanted_bytes else 0.0

    def _report(self, load: RowLoad, loaded: int, computed: int, now_s: float) -> None:
        report = FetchReport(load.stream, load.attempt, load.owner_epoch, loaded, computed)
        self._reports.append((now_s, report))


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
