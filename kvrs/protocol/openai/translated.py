"""Fields of requests that are translated to a chat: those of the Responses and Messages APIs."""

from collections.abc import Mapping, Set
from typing import Any

import msgspec

from kvrs.errors import RequestError, UnknownFieldError
from kvrs.protocol.openai.decoding import decode_as, given_as
from kvrs.protocol.openai.fields import is_among
from kvrs.protocol.openai.structure import check_structure

Fields = dict[str, Any]

# Sampling fields that the APIs lack; the chat's check reads them under the same names.
AS_IN_CHAT = {
    *("model", "temperature", "top_p", "cache_salt", "seed", "top_k"),
    *("min_p", "min_tokens", "stop_token_ids", "ignore_eos", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("chat_template_kwargs",),
}

_FIELDS = msgspec.json.Decoder(dict[str, Any])


def read_fields(
    body: bytes, allowed: Set[str], neutral: Mapping[str, tuple[Any, ...]], max_elements: int
) -> Fields:
    """Decode a request's body; return its fields without nulls. `neutral`: fields that are refused
    with any other value.

    Raises:
        RequestError: malformed, or an unknown or refused field.
    """
    if body.lstrip().startswith(b"{"):
        check_structure(body, max_elements=max_elements)
    given = decode_as(_FIELDS, body)
    fields = {name: value for name, value in given.items() if value is not None}
    known = {*allowed, *neutral}
    if unknown := [name for name in fields if name not in known]:
        raise UnknownFieldError(unknown[0], sorted(known))
    for name, value in fields.items():
        if name in neutral and not is_among(value, neutral[name]):
            values = (*neutral[name], None)
            listed = " or ".join(msgspec.json.encode(each).decode() for each in values)
            raise not_supported(name, value, listed)
    return fields


def not_supported(name: str, value: Any, allowed: str) -> RequestError:
    given = given_as(name, msgspec.json.encode(value))
    return RequestError(f"{given} is not supported; allowed: {allowed}", param=name)


def list_of(fields: Fields, name: str, allowed: str) -> list[Any]:
    """Return a list of one item or more. Raises RequestError: it is missing, or something else."""
    if name not in fields:
        raise RequestError(f"{name} is missing; allowed: {allowed}", param=name)
    if not isinstance(value := fields[name], list) or not value:
        raise not_supported(name, value, allowed)
    return value


def string_of(item: Fields, name: str, param: str) -> str:
    """Return the string `name` of an object. Raises RequestError: it is missing, or no string."""
    if not isinstance(value := item.get(name), str):
        raise not_supported(f"{param}.{name}", value, "a string")
    return value
