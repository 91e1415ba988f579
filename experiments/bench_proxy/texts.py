"""Texts of the mock engines in lockstep: a line per token, the part of a choice that it adds."""

import json
import re
from dataclasses import dataclass

_PROSE = """The proxy keeps a journal of every stream: the ids of its prompt, the ids of its
output, and the state of its sampler. When an instance dies, each of its streams goes on at another
one, from the first token that its client does not have. Nothing is sent twice, nothing is lost, and
the client sees a pause that is shorter than most people's patience. """
_CODE = '''
def merge(left: list[int], right: list[int]) -> list[int]:
    """Return both lists as one; "left" comes first where two values are equal."""
    merged, at = [], 0
    for value in left:
        while at < len(right) and right[at] < value:
            merged.append(right[at])
            at += 1
        merged.append(value)
    print(f"merged\\t{len(merged)}\\n")
    return merged + right[at:]
'''
_CHINESE = """代理为每个数据流保存日志、提示词的编号、输出的编号以及采样器的状态。\
当一个实例失效时、它的每个数据流都会在另一个实例上继续、从客户端尚未收到的第一个词元开始。\
没有重复、也没有丢失。"""
_ARGUMENTS = {
    "city": "Zürich",
    "days": 3,
    "units": "metric",
    "note": 'with "quotes" and\nlines',
    "fields": ["temperature", "wind", "rain"],
}
# Tokens of a call before its name: a parser holds their text back.
_BEFORE_NAME = 3
_PIECES = re.compile(r"\s?\w{1,6}|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Text:
    """One kind of text: its lines, and the endpoint that gives it."""

    name: str
    title: str
    is_chat: bool
    lines: tuple[str, ...]


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _completion(pieces: list[str]) -> tuple[str, ...]:
    return tuple(f'"text":{_compact(piece)}' for piece in pieces)


def _calls(count: int) -> tuple[str, ...]:
    """Tool calls as vLLM's parsers write them: a name, then its arguments piece by piece."""
    lines: list[str] = []
    for index in range(count):
        lines += ['"delta":{}'] * _BEFORE_NAME
        name = {"name": "forecast", "arguments": ""}
        call = {"id": f"call_{index}", "type": "function", "index": index, "function": name}
        lines.append(f'"delta":{_compact({"tool_calls": [call]})}')
        for piece in _PIECES.findall(_compact(_ARGUMENTS | {"call": index})):
            part = {"index": index, "function": {"arguments": piece}}
            lines.append(f'"delta":{_compact({"tool_calls": [part]})}')
    return tuple(lines)


TEXTS = (
    Text("prose", "English prose", False, _completion(_PIECES.findall(_PROSE))),
    Text("code", "code", False, _completion(_PIECES.findall(_CODE))),
    Text("chinese", "Chinese", False, _completion(re.findall(r"..?", _CHINESE))),
    Text("tools", "tool calls", True, _calls(4)),
)


def as_sections(texts: tuple[Text, ...] = TEXTS) -> str:
    """The file of texts that `engine.c` reads; the number of a text's section is its place from 1
    on.
    """
    return "\n\n".join("\n".join(text.lines) for text in texts) + "\n"
