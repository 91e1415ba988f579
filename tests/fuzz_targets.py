"""The targets: a parser of bytes from outside, inputs of ours that it takes, and the errors with
which it may refuse others.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml

from kvrs.config.backup import BackupSettings
from kvrs.config.document import parse_yaml
from kvrs.config.file import Config, dump_config, parse_config
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.core.event_log import event_line, header_line, rerun
from kvrs.core.model import events as ev
from kvrs.errors import ConfigError, KvrsError, LogError, RequestError, TransferError, UpstreamError
from kvrs.gossip import wire
from kvrs.ids import NodeId
from kvrs.protocol import frames
from kvrs.protocol.openai.requests import ChatRequest, parse_completion_request
from kvrs.protocol.pages import ProbeFrame
from kvrs.proxy.wire.events import (
    TOKEN_IDS,
    EventSplitter,
    cut_list,
    head_of,
    next_token_ids,
    prompt_ids_of,
)
from kvrs_engine.engine.chat import ChatTemplate
from kvrs_lab.traces import mooncake


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refused: tuple[type[Exception], ...]
    words: Sequence[bytes] = field(default=())  # Inserted beside random bytes.


_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":"a","token_ids":[5,6],"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
_COMPLETION = b'{"model":"m","prompt":[1,2,3],"max_tokens":5,"temperature":0.5,"stop":["a"]}'
_CHAT = (
    b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]},{"role":"assistant",'
    b'"content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f",'
    b'"arguments":"{}"}}]}],"tools":[{"type":"function","function":{"name":"f"}}]}'
)
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | tojson }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
)
_TRACE = b'{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}\n'


def _sse(data: bytes) -> None:
    splitter, refused = EventSplitter(1 << 16), 0
    for at in range(0, len(data), 256):
        for event in splitter.feed(data[at : at + 256]):
            for read in (next_token_ids, head_of, prompt_ids_of, _without_ids):
                try:
                    read(event)
                except UpstreamError:
                    refused += 1
    if refused:
        raise UpstreamError("an event that is none")


def _without_ids(event: bytes) -> bytes:
    return cut_list(event, TOKEN_IDS)


def _header(data: bytes) -> object:
    return frames.decode_header(data, *frames.FrameType)


_FRAME_DECODERS = (
    _header,
    frames.decode_hello,
    frames.decode_welcome,
    frames.decode_refused,
    frames.decode_pull,
    frames.decode_probe,
    frames.decode_offer,
    frames.decode_store,
    frames.decode_held,
    frames.decode_answer,
)


_SEALED = (frames.decode_pull, frames.decode_probe, frames.decode_offer, frames.decode_store)


def _frame(data: bytes) -> None:
    """A body for the decoder that the first byte names, sealed as a sender would: a peer may send
    any frame.
    """
    decode = _FRAME_DECODERS[data[0] % len(_FRAME_DECODERS)] if data else _header
    body = data[1:]
    if decode in _SEALED:
        body += frames.checksum(body).to_bytes(frames.CHECKSUM_BYTES)
    decode(body)


def _yaml(data: bytes) -> None:
    parse_config(parse_yaml(data.decode()))


def _log(data: bytes) -> None:
    rerun(io.StringIO(data.decode()))


_CHAT_TEMPLATE = ChatTemplate({"default": _TEMPLATE}, {"bos_token": "<s>"}, Path("fuzz"))


def _chat(data: bytes) -> None:
    _CHAT_TEMPLATE.render(msgspec.json.decode(data, type=ChatRequest))


_LOG = "\n".join(
    [
        header_line(PolicySettings(), SloSettings(), BackupSettings()),
        event_line(1.0, ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 1e9), []),
        event_line(2.0, ev.SettingsReloaded(PolicySettings(slots_max=3), SloSettings()), []),
        event_line(3.0, ev.TimerFired(), []),
    ]
).encode()
_UPDATE = wire.MemberUpdate(NodeId("n0"), 1, 2, wire.Status.ALIVE, "127.0.0.1:1", (NodeId("n1"),))
_PACKETS = [
    wire.encode(wire.Ping(1, 2, 3, (_UPDATE,))),
    wire.encode(wire.Ack(1, 2, 3, (_UPDATE,))),
    wire.encode(wire.PingReq(1, 2, 3, NodeId("n0"), (_UPDATE,))),
]
_NUMBERS = (b"-1", b"0", b"1e999", b"NaN", b"18446744073709551616", b"null", b"[", b"{", b"\x00")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_AT = {decode: number for number, decode in enumerate(_FRAME_DECODERS)}
_PROBE = frames.encode_probe(ProbeFrame(1, 4096))
_FRAMES = [
    bytes([_AT[_header]]) + _PROBE[: frames.HEADER_BYTES],
    bytes([_AT[frames.decode_probe]]) + _PROBE[frames.HEADER_BYTES : -frames.CHECKSUM_BYTES],
    bytes([_AT[frames.decode_refused]]) + frames.encode_refused("no")[frames.HEADER_BYTES :],
]
TARGETS = (
    Target("sse", _sse, [_EVENT], (UpstreamError,), (b"data: ", b"\n\n", b"\r\n\r\n")),
    Target(
        "page frames",
        _frame,
        _FRAMES,
        (TransferError,),
    ),
    Target("gossip", wire.decode, _PACKETS, (KvrsError,)),
    Target("completions", parse_completion_request, [_COMPLETION], (RequestError,), _NUMBERS),
    Target("traces", mooncake._parse_line, [_TRACE], (ValueError,), _NUMBERS),
    Target("chat templates", _chat, [_CHAT], (RequestError, *_UNREADABLE), _NUMBERS),
    Target("event log", _log, [_LOG], (LogError, UnicodeDecodeError), _NUMBERS),
    Target(
        "yaml",
        _yaml,
        [dump_config(Config()).encode()],
        (ConfigError, yaml.YAMLError, UnicodeDecodeError),
        (b": ", b"- ", b"&a ", b"*a", b"<<: ", b"!!python/name:os.system ", *_NUMBERS),
    ),
)
