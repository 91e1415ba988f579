"""The conversion of chat messages to a prompt by the model's template.

A template is rendered once per stream, at its first attempt; later attempts have the token ids.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrs.errors import ConfigError, RequestError
from kvrs.protocol.openai.decoding import MAX_TEMPLATE_VALUES, check_structure
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.protocol.openai.translated import not_supported

Decoded = TypeVar("Decoded")

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_OBJECTS: msgspec.json.Decoder[list[dict[str, Any]]] = msgspec.json.Decoder(list[dict[str, Any]])
_ARGUMENTS = msgspec.json.Decoder(dict[str, Any] | None)


class ChatTemplate:
    """The template of one model, which runs in Jinja's sandbox with the settings of Hugging
    Face.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], where: Path
    ) -> None:
        """Compile the templates by name; `default` is used unless another one fits better.

        Raises:
            ConfigError: a template is no valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            namespace=_Namespace,
            dict=_new_dict,
        )
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except jinja2.TemplateError as error:
            raise ConfigError(f"{where}: chat_template: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, request: ChatRequest) -> str:
        """Render the prompt of a request up to the start of the answer. Large prompts take a
        second, so do not call this on the event loop.

        Raises:
            RequestError: the template does not accept the messages.
        """
        tools = _decoded(request.tools, "tools", _OBJECTS) if request.may_call_tools else None
        messages = _decoded(request.messages, "messages", _OBJECTS)
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [_flatten(message, index) for index, message in enumerate(messages)],
            "tools": tools,
            "add_generation_prompt": request.add_generation_prompt,
        }
        if bytes(request.documents) != b"null":
            variables["documents"] = _decoded(request.documents, "documents", _OBJECTS)
        extra = _decoded(request.chat_template_kwargs, "chat_template_kwargs", _ARGUMENTS) or {}
        if taken := sorted(extra.keys() & variables.keys()):
            raise RequestError(
                f"chat_template_kwargs must not set {taken[0]!r}", param="chat_template_kwargs"
            )
        if request.reasoning_effort is not None:
            extra["reasoning_effort"] = request.reasoning_effort
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise RequestError("this model has a chat template for tools only", param="tools")
        try:
            return template.render(**variables, **extra)
        except (
            Exception
        ) as error:  # A template may raise any exception, and the messages are its cause.
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from None


def load_chat_template(model_directory: Path) -> ChatTemplate | None:
    """Read `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`; None: there is
    neither.

    Raises:
        ConfigError: the template is invalid.
    """
    where = model_directory / "tokenizer_config.json"
    config = _read_config(where)
    tokens = {
        name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None
    }
    own_file = model_directory / "chat_template.jinja"
    match (
        own_file.read_text(encoding="utf-8") if own_file.is_file() else config.get("chat_template")
    ):
        case None:
            return None
        case str() as source:
            return ChatTemplate({"default": source}, tokens, where)
        case [*named] if named and all(_is_named(entry) for entry in named):
            return ChatTemplate(
                {entry["name"]: entry["template"] for entry in named}, tokens, where
            )
        case _:
            raise ConfigError(
                f"{where}: chat_template: allowed: a string, or a list of objects "
                f"with name and template"
            )


def _read_config(where: Path) -> dict[str, Any]:
    if not where.is_file():
        return {}
    try:
        return msgspec.json.decode(where.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _is_named(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    )


def _token_text(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _decoded(value: msgspec.Raw, param: str, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
    text = bytes(value)
    check_structure(text, param, max_values=MAX_TEMPLATE_VALUES)
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{param} cannot be read: {error}", param=param) from None


def _flatten(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Convert a message for templates: its content to one text, the arguments of tool calls to
    objects.
    """
    match message.get("content"):
        # Engines answer with no content where there is only reasoning or a call.
        case None if message.get("role") == "assistant":
            message["content"] = ""
        case list() as parts:
            message["content"] = "\n".join(
                _part_text(part, f"messages[{index}].content[{i}]") for i, part in enumerate(parts)
            )
        case str():
            pass
        case other:
            raise not_supported(f"messages[{index}].content", other, "a string or a list of parts")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError("tool_calls must be a list", param=f"messages[{index}].tool_calls")
        message["tool_calls"] = [
            _with_arguments(call, f"messages[{index}].tool_calls[{i}]")
            for i, call in enumerate(calls)
        ]
    return message


def _part_text(part: object, where: str) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str() as text}:
            return text
        case _:
            raise RequestError("only parts of type 'text' are supported", param=where)


def _with_arguments(call: object, where: str) -> dict[str, Any]:
    """Parse the arguments of a tool call, which clients send as JSON text; templates write JSON
    themselves.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise RequestError("a tool call needs a function with a name", param=where)
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        check_structure(
            arguments.encode(errors="replace"),
            f"{where}.function.arguments",
            max_values=MAX_TEMPLATE_VALUES,
        )
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"arguments must be JSON: {error}", param=f"{where}.function.arguments"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


# HTML is not escaped, as in transformers, which defines these templates.
def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses attributes with a leading underscore, which Jinja's sandbox would
    trust.
    """

    def __init__(self, **values: Any) -> None:
        for name in values:
            _refuse_private(name)
        super().__init__(**values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")


def _new_dict(*positional: Any, **named: Any) -> dict[str, Any]:
    return dict(*positional, **named)
