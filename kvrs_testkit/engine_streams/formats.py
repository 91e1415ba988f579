"""The formats in which models write tool calls, one function per format.

A function takes calls and returns the text that a model writes for them.
"""

# ruff: noqa: RUF001 - the bars in the marks of several models are of full width.

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
Format = Callable[[Sequence[Call]], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    """The value as XML formats have it: a string as it is, others as JSON."""
    return value if isinstance(value, str) else _json(value)


def _python(value: Any) -> str:
    return repr(value)


def _objects(calls: Sequence[Call], key: str = "arguments") -> Iterable[str]:
    return (_json({"name": name, key: arguments}) for name, arguments in calls)


def tagged(
    start: str, end: str, key: str = "arguments", between: str = "\n", around: str = "\n"
) -> Format:
    """Each call is a JSON object between two tags."""
    return lambda calls: between.join(
        f"{start}{around}{one}{around}{end}" for one in _objects(calls, key)
    )


def listed(start: str, end: str = "", key: str = "arguments") -> Format:
    """All calls are objects of one JSON list."""
    return lambda calls: f"{start}[{', '.join(_objects(calls, key))}]{end}"


def objects(start: str, between: str, key: str) -> Format:
    """All calls are JSON objects, one behind the other."""
    return lambda calls: start + between.join(_objects(calls, key))


def pythonic(start: str = "[", end: str = "]", between: str = ", ") -> Format:
    """The calls are calls of Python functions."""
    return lambda calls: (
        start
        + between.join(
            f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
            for name, arguments in calls
        )
        + end
    )


def deepseek_v3(calls: Sequence[Call]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def dsml(block: str, space: str = "") -> Format:
    """The language of DeepSeek's later models."""
    mark = f"｜DSML｜{space}"

    def written(calls: Sequence[Call]) -> str:
        lines = [f"<{mark}{block}>"]
        for name, arguments in calls:
            lines.append(f'<{mark}invoke name="{name}">')
            for key, value in arguments.items():
                kind = "true" if isinstance(value, str) else "false"
                lines.append(
                    f'<{mark}parameter name="{key}" string="{kind}">{_plain(value)}'
                    f"</{mark}parameter>"
                )
            lines.append(f"</{mark}invoke>")
        return "\n".join([*lines, f"</{mark}{block}>"])

    return written


def keys_and_values(
    start: str = "<tool_call>",
    end: str = "</tool_call>",
    sep: str = "\n",
    within: str | None = None,
) -> Format:
    """The arguments are pairs of tagged keys and tagged values, with `within` between the two."""
    inner = sep if within is None else within

    def written(calls: Sequence[Call]) -> str:
        each = []
        for name, arguments in calls:
            pairs = "".join(
                f"<arg_key>{key}</arg_key>{inner}<arg_value>{_plain(value)}</arg_value>{sep}"
                for key, value in arguments.items()
            )
            each.append(f"{start}{name}{sep}{pairs}{end}")
        return "\n".join(each)

    return written


def functions(start: str, end: str, line: str = "\n") -> Format:
    """Each call is `<function=NAME>` with `<parameter=KEY>` elements between two tags."""

    def written(calls: Sequence[Call]) -> str:
        each = []
        for name, arguments in calls:
            parameters = "".join(
                f"<parameter={key}>{line}{_plain(value)}{line}</parameter>\n"
                for key, value in arguments.items()
            )
            each.append(f"{start}\n<function={name}>\n{parameters}</function>\n{end}")
        return "\n".join(each)

    return written


def invokes(start: str, end: str, mark: str = "", quote: str = '"') -> Format:
    """All calls are `<invoke name=...>` elements of one block."""

    def written(calls: Sequence[Call]) -> str:
        lines = [start]
        for name, arguments in calls:
            lines.append(f"<{mark}invoke name={quote}{name}{quote}>")
            lines += [
                f"<{mark}parameter name={quote}{key}{quote}>{_plain(value)}</{mark}parameter>"
                for key, value in arguments.items()
            ]
            lines.append(f"</{mark}invoke>")
        return "\n".join([*lines, end])

    return written


def minimax_m3(calls: Sequence[Call]) -> str:
    mark = "]<]minimax[>["
    lines = [f"{mark}<tool_call>"]
    for name, arguments in calls:
        lines.append(f'{mark}<invoke name="{name}">')
        for key, value in arguments.items():
            inner = _plain(value)
            if isinstance(value, list):
                inner = "".join(f"{mark}<item>{_plain(one)}{mark}</item>" for one in value)
            lines.append(f"{mark}<{key}>{inner}{mark}</{key}>")
        lines.append(f"{mark}</invoke>")
    return "\n".join([*lines, f"{mark}</tool_call>"])


def minicpm5(calls: Sequence[Call]) -> str:
    each = []
    for name, arguments in calls:
        inner = "".join(
            f'<param name="{key}">{_plain(value)}</param>' for key, value in arguments.items()
        )
        each.append(f'<function name="{name}">{inner}</function>')
    return "\n".join(each)


def kimi_k2(calls: Sequence[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{_json(arguments)}"
        "<|tool_call_end|>"
        for n, (name, arguments) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def kimi_k3(calls: Sequence[Call]) -> str:
    kinds = {str: "string", bool: "boolean", list: "array"}
    text = "<|open|>tools<|sep|>"
    for n, (name, arguments) in enumerate(calls, 1):
        text += f'<|open|>call tool="{name}" index="{n}"<|sep|>'
        for key, value in arguments.items():
            text += (
                f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>'
                f"{_plain(value)}<|close|>argument<|sep|>"
            )
        text += "<|close|>call<|sep|>"
    return text + "<|close|>tools<|sep|>"


def step3(calls: Sequence[Call]) -> str:
    each = []
    for name, arguments in calls:
        inner = "".join(
            f'<steptml:parameter name="{key}">{_plain(value)}</steptml:parameter>'
            for key, value in arguments.items()
        )
        each.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{inner}'
            "</steptml:invoke><｜tool_call_end｜>"
        )
    return "<｜tool_calls_begin｜>\n" + "\n".join(each) + "\n<｜tool_calls_end｜>"


def _in_braces(arguments: dict[str, Any], quote: str) -> str:
    def one(value: Any) -> str:
        if isinstance(value, list):
            return "[" + ",".join(one(each) for each in value) + "]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else _json(value)

    return "{" + ",".join(f"{key}:{one(value)}" for key, value in arguments.items()) + "}"


def gemma4(calls: Sequence[Call]) -> str:
    quote = '<|"|>'
    return "".join(
        f"<|tool_call>call:{name}{_in_braces(arguments, quote)}<tool_call|>"
        for name, arguments in calls
    )


def functiongemma(calls: Sequence[Call]) -> str:
    each = []
    for name, arguments in calls:
        inner = ",".join(
            f"{key}:<escape>{_plain(value)}<escape>" for key, value in arguments.items()
        )
        each.append(f"<start_function_call>call:{name}{{{inner}}}<end_function_call>")
    return "".join(each)


def apertus(calls: Sequence[Call]) -> str:
    each = ", ".join(_json({name: arguments}) for name, arguments in calls)
    return f"<|tools_prefix|>[{each}]<|tools_suffix|>"


def mistral_v11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def plamo3(calls: Sequence[Call]) -> str:
    each = "".join(
        "<|plamo:begin_tool_request:plamo|>"
        f"<|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
        f"{_json(arguments)}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        for name, arguments in calls
    )
    return f"<|plamo:begin_tool_requests:plamo|>{each}<|plamo:end_tool_requests:plamo|>"


def inkling(calls: Sequence[Call]) -> str:
    return "".join(
        "<|message_model|><|content_invoke_tool_json|>"
        f"{_json({'name': name, 'args': arguments})}<|end_message|>"
        for name, arguments in calls
    )


def hunyuan_v3(calls: Sequence[Call]) -> str:
    each = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        each.append(f"<tool_call>{name}<tool_sep>\n{pairs}</tool_call>\n")
    return "<tool_calls>\n" + "".join(each) + "</tool_calls>"


def hunyuan_v4(calls: Sequence[Call]) -> str:
    each = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{_plain(value)}</arg_value>"
            for key, value in arguments.items()
        )
        each.append(f"<tool_call>{name}{pairs}</tool_call>")
    return "<tool_calls>" + "".join(each) + "</tool_calls>"


def k2_horizon(calls: Sequence[Call]) -> str:
    each = []
    for name, arguments in calls:
        pairs = "".join(
            f"<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{_plain(value)}</ifm|arg_value>\n"
            for key, value in arguments.items()
        )
        each.append(f"<ifm|tool_call>{name}\n{pairs}</ifm|tool_call>\n")
    return "<ifm|tool_calls>\n" + "".join(each) + "</ifm|tool_calls>"


def muse_glimmer(calls: Sequence[Call]) -> str:
    each = "\n".join(
        f'<atem:invoke name="{name}">\n'
        + "".join(
            f'<atem:parameter name="{key}">{_plain(value)}</atem:parameter>\n'
            for key, value in arguments.items()
        )
        + "</atem:invoke>"
        for name, arguments in calls
    )
    return f"<atem:function_calls>\n{each}\n</atem:function_calls>"


def only_arguments(calls: Sequence[Call]) -> str:
    """Write a call under a grammar that forces one named function."""
    return _json(calls[0][1])


def forced_list(calls: Sequence[Call]) -> str:
    """Write calls under a grammar that forces some call."""
    return "[" + ", ".join(_objects(calls, "parameters")) + "]"


def cohere(calls: Sequence[Call]) -> str:
    each = (
        _json({"tool_call_id": str(n), "tool_name": name, "parameters": arguments})
        for n, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[{', '.join(each)}]<|END_ACTION|>"


def gcml(calls: Sequence[Call]) -> str:
    lines = ["<｜GCML｜tool_calls>"]
    for name, arguments in calls:
        lines.append(f'<｜GCML｜invoke name="{name}">')
        for key, value in arguments.items():
            kind = "true" if isinstance(value, str) else "false"
            lines.append(
                f'<｜GCML｜parameter name="{key}" string="{kind}">{_plain(value)}'
                "</｜GCML｜parameter>"
            )
        lines.append("</｜GCML｜invoke>")
    return "\n".join([*lines, "</｜GCML｜tool_calls>"])


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>{_json(arguments)}"
        "<|call|>"
        for name, arguments in calls
    )
