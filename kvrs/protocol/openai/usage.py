"""An engine's facts about a whole stream beside its token counts: details of the usage (reasoning,
modalities of the prompt), and other fields of the usage event.

Only an engine that has seen the whole stream has them, so a cut stream has none. The proxy counts
the tokens itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvrs.protocol.openai.chunks import Usage

_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_OF_PROMPT, _OF_OUTPUT = "prompt_tokens_details", "completion_tokens_details"
# Fields of a usage event that are kept: others may be parameters of transfers between instances.
_BESIDE = ("system_fingerprint", "service_tier", "metrics")


class EngineFacts(msgspec.Struct, frozen=True):
    """Facts of one stream: `details` go into the usage, `beside` into the answer."""

    details: dict[str, Any] = {}
    beside: dict[str, Any] = {}


NO_FACTS = EngineFacts()


def facts_of(event: Mapping[str, Any]) -> EngineFacts:
    """Return the facts in a decoded usage event, except the cached tokens, which the prefill
    instance counts.
    """
    details = _non_null(
        {name: each for name, each in event["usage"].items() if name not in _COUNTS}
    )
    for name in (_OF_PROMPT, _OF_OUTPUT):
        if not isinstance(each := details.get(name, {}), dict):
            del details[name]
        else:
            each.pop("cached_tokens", None)
    beside = {name: event[name] for name in _BESIDE if name in event}
    return EngineFacts(details, _non_null(beside))


def with_facts(usage: Usage, facts: EngineFacts) -> Mapping[str, Any]:
    """Return the usage that the client gets: `usage`, and the details that the engine reported."""
    counts: dict[str, Any] = msgspec.to_builtins(usage)
    details = dict(facts.details)
    of_prompt = {**details.pop(_OF_PROMPT, {}), **counts.pop(_OF_PROMPT, {})}
    return counts | ({_OF_PROMPT: of_prompt} if of_prompt else {}) | details


def facts_together(choices: Sequence[tuple[EngineFacts | None, bool]]) -> EngineFacts:
    """Merge the facts of several choices, each with whether it is the first choice of its prompt.
    None: a stream was cut.

    Numbers are added. Numbers about a prompt count once for its choices. Values that differ and
    cannot be added are left out.
    """
    found = [facts for facts, _ in choices if facts is not None]
    if len(found) < len(choices):
        return NO_FACTS
    if len(found) == 1:
        return found[0]
    of_prompt = [_part(facts, _OF_PROMPT) for facts, is_first in choices if is_first]
    others = [_without(facts.details, _OF_PROMPT) for facts in found]
    details = _together(others) | _together(of_prompt)
    beside = {
        name: value
        for name, value in found[0].beside.items()
        if all(facts.beside.get(name) == value for facts in found)
    }
    return EngineFacts(details, beside)


def _part(facts: EngineFacts | None, name: str) -> dict[str, Any]:
    details = {} if facts is None else facts.details
    return {name: details[name]} if name in details else {}


def _without(details: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {each: value for each, value in details.items() if each != name}


def _together(given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for each in given for name in each)
    made = {name: _sum(each[name] for each in given if name in each) for name in names}
    return _non_null(made)


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of numbers, or the value that all others equal; None: they differ and cannot
    be added.
    """
    first, *rest = values
    if isinstance(first, dict) and all(isinstance(each, dict) for each in rest):
        return _together([first, *rest])
    if all(type(each) in (int, float) for each in (first, *rest)):
        return sum(rest, start=first)
    return first if all(each == first for each in rest) else None


def _non_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without those that are null, in inner objects too."""
    return {
        name: _non_null(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }
