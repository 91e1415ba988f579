"""`kv_transfer_params` of vLLM's NixlConnector, checked field by field before they are forwarded to
a decode instance.

vLLM does not check them: with too few blocks its engine dies, and without a required field the
request hangs for ever. Parameters serve one attempt, and only in the first two thirds of their
lease: later vLLM may read blocks with other KV, without noticing.
"""

from typing import Annotated, Any

import msgspec

from kvrs.protocol.instance import Natural
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.wire.errors import UnusableError

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
