"""Requests of each kind that vLLM's own tests send to its OpenAI API, in words of the test model,
and how two answers to one request are compared: status, the names and types of all fields, and what
is said; of two refusals, the field that they name.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = "ka lo mi ren sta"
IDS = [5, 6, 7, 8, 9]
MESSAGES = [{"role": "system", "content": "vor ti el"}, {"role": "user", "content": WORDS}]
TURNS = [
    *MESSAGES,
    {"role": "assistant", "content": "an dra"},
    {"role": "user", "content": [{"type": "text", "text": text} for text in ("shi pu", "ne")]},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": SCHEMA},
}
NAMED = {"type": "function", "function": {"name": "look"}}
USAGE = {"include_usage": True}


@dataclass(frozen=True)
class Case:
    """`refused`: the field for which kvrs alone refuses it, by decision, or names it otherwise."""

    name: str
    path: str
    body: dict[str, Any] = field(hash=False)
    refused: str = ""


def _cases() -> Iterator[Case]:
    for name, fields in _OF_BOTH.items():
        for path, prompt in ((COMPLETIONS, {"prompt": WORDS}), (CHAT, {"messages": MESSAGES})):
            kind = "chat" if path == CHAT else "text"
            body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True} | prompt | fields
            yield Case(f"{kind}-{name}", path, body, _REFUSED.get(name, ""))
    for path, cases in ((COMPLETIONS, _OF_TEXT), (CHAT, _OF_CHAT)):
        for name, body in cases.items():
            body = {"max_tokens": 8, "temperature": 0} | body
            yield Case(name, path, body, _REFUSED.get(name, ""))


_OF_BOTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"stream": True},
    "usage": {"stream": True, "stream_options": USAGE},
    "no-usage": {"stream": True, "stream_options": {"include_usage": False}},
    "empty-options": {"stream": True, "stream_options": {}},
    "usage-each": {"stream": True, "stream_options": USAGE | {"continuous_usage_stats": True}},
    "options-without-stream": {"stream_options": USAGE},
    "null-option-without-stream": {"stream_options": {"include_usage": None}},
    "two-seeded": {"n": 2, "temperature": 1.0, "seed": 42},
    "two-seeded-stream": {"n": 2, "temperature": 1.0, "seed": 42, "stream": True},
    "long-seed": {"temperature": 1.0, "seed": (1 << 63) - 1},
    "seed-too-long": {"seed": 1 << 64},
    "nucleus": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 3},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "stop": {"stop": ["an", "q"]},
    "stop-stream": {"stop": "an", "stream": True},
    "stop-ids": {"stop_token_ids": [7]},
    "least-tokens": {"min_tokens": 4},
    "bias": {"logit_bias": {"7": 100}},
    "bias-of-no-token": {"logit_bias": {"999999": 1}},
    "allowed-ids": {"allowed_token_ids": [7, 8, 9]},
    "bad-words": {"bad_words": ["ka"]},
    "no-tokens": {"max_tokens": -1},
    "too-hot": {"temperature": -0.5},
    "no-nucleus": {"top_p": 1.5},
    "no-penalty": {"frequency_penalty": 3.0},
    "no-choices": {"n": 0},
    "wrong-type": {"max_tokens": "many"},
    "no-model": {"model": "nowhere"},
    "token-ids": {"return_token_ids": True},
    "user": {"user": "someone"},
    "json-object": {"response_format": {"type": "json_object"}, "max_tokens": 24},
    "json-schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA},
        },
        "max_tokens": 48,
        "ignore_eos": False,
    },
    "format-text": {"response_format": {"type": "text"}},
    "no-format": {"response_format": {"type": "nothing"}},
    "by-choice": {"structured_outputs": {"choice": ["ka", "lo"]}, "ignore_eos": False},
    "by-regex": {"structured_outputs": {"regex": "(ka|lo){2}"}, "ignore_eos": False},
    "by-grammar": {"structured_outputs": {"grammar": 'root ::= "ka"'}, "ignore_eos": False},
    "by-schema": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 48, "ignore_eos": False},
    "special-tokens": {"skip_special_tokens": False},
    "with-stop": {"stop": ["an"], "include_stop_str_in_output": True},
    "truncated": {"truncate_prompt_tokens": 3},
    "prompt-probabilities": {"prompt_logprobs": 1},
    "wrong-probabilities": {"prompt_logprobs": -2},
    "beams": {"use_beam_search": True, "n": 2},
    "field-of-nobody": {"min_characters": 10},
    "each-alone": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    "each-without-stream": {"stream_options": {"continuous_usage_stats": True}},
    "two-with-usage": {
        "n": 2,
        "temperature": 1.0,
        "seed": 42,
        "stream": True,
        "stream_options": USAGE | {"continuous_usage_stats": True},
    },
    "token-ids-stream": {"return_token_ids": True, "stream": True},
    "interval": {"stream": True, "stream_interval": 3},
    "cut-right": {"truncate_prompt_tokens": 3, "truncation_side": "right"},
    "first-of-several-stops": {"stop": [*"bcdfghij"]},
    "stop-with-ids": {"stop": ["an"], "return_token_ids": True},
    "least-before-stop": {"stop": ["a"], "min_tokens": 4},
    "salt": {"cache_salt": "some-salt"},
    "no-salt": {"cache_salt": ""},
    "session": {"session_id": "s", "return_token_offsets": False, "mm_payload": "none"},
    "first": {"priority": 0},
    "later": {"priority": 5},
    "request-id": {"request_id": "mine"},
    "further-arguments": {"vllm_xargs": {"a": 1}},
    "repetition": {
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}
    },
    "spaces": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "bad-regex": {"structured_outputs": {"regex": "[.*"}},
    "regex-of-no-text": {"structured_outputs": {"regex": {"1": "a"}}},
    "bad-grammar": {"structured_outputs": {"grammar": "root ::= nothing here"}},
    "bad-schema": {
        "structured_outputs": {"json": {"type": "object", "properties": {"foo": "bar"}}}
    },
    "two-constraints": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "by-choice-stream": {
        "structured_outputs": {"choice": ["ka", "lo"]},
        "ignore_eos": False,
        "stream": True,
    },
    "no-schema": {"response_format": {"type": "json_schema"}},
    "beams-stream": {"use_beam_search": True, "n": 2, "stream": True},
    "prompt-probabilities-0": {"prompt_logprobs": 0},
    "all-prompt-probabilities": {"prompt_logprobs": -1},
    "prompt-probabilities-stream": {"prompt_logprobs": 1, "stream": True},
    "old-constraint": {"guided_choice": ["ka", "lo"]},
}
# By which field a kind of request is refused here alone; or by vLLM without one, or by another one
# than was sent.
_REFUSED = {
    "no-messages": "messages",
    "chat-too-many": "top_logprobs",
    "chat-too-many-stream": "top_logprobs",
    "chat-all-probabilities": "top_logprobs",
    "later": "priority",
    "request-id": "request_id",
    "further-arguments": "vllm_xargs",
    "old-constraint": "guided_choice",
    "beams-stream": "use_beam_search",
    "field-of-nobody": "min_characters",
}
_OF_TEXT: dict[str, dict[str, Any]] = {
    "ids": {"prompt": IDS},
    "no-prompt": {"prompt": []},
    "empty-text": {"prompt": ""},
    "two-prompts": {"prompt": [WORDS, "vor ti"]},
    "two-of-ids": {"prompt": [IDS, [7, 8]]},
    "two-prompts-stream": {"prompt": [WORDS, "vor ti"], "stream": True},
    "two-of-two": {"prompt": [WORDS, "vor ti"], "n": 2, "temperature": 1.0, "seed": 1},
    "probabilities-0": {"prompt": IDS, "logprobs": 0},
    "probabilities-5": {"prompt": IDS, "logprobs": 5},
    "probabilities-stream": {"prompt": IDS, "logprobs": 2, "stream": True},
    "too-many-probabilities": {"prompt": IDS, "logprobs": 30},
    "echo": {"prompt": WORDS, "echo": True},
    "echo-stream": {"prompt": WORDS, "echo": True, "stream": True},
    "echo-ids": {"prompt": WORDS, "echo": True, "return_token_ids": True},
    "echo-ids-stream": {"prompt": IDS, "echo": True, "return_token_ids": True, "stream": True},
    "echo-two": {"prompt": [IDS, [7, 8]], "echo": True, "n": 2, "temperature": 1.0, "seed": 1},
    "echo-probabilities-0": {"prompt": IDS, "echo": True, "logprobs": 0},
    "echo-probabilities": {"prompt": WORDS, "echo": True, "logprobs": 1},
    "echo-all": {
        "prompt": WORDS,
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    },
    "echo-only": {"prompt": IDS, "echo": True, "max_tokens": 0, "logprobs": 1},
    "echo-only-plain": {"prompt": WORDS, "echo": True, "max_tokens": 0},
    "nothing-at-all": {"prompt": WORDS, "max_tokens": 0},
    "suffix": {"prompt": WORDS, "suffix": "el"},
    "probabilities-of-two": {"prompt": IDS, "logprobs": 1, "n": 2, "temperature": 1.0, "seed": 1},
    "names-as-ids": {"prompt": IDS, "logprobs": 1, "return_tokens_as_token_ids": True},
    "probabilities-of-ids": {"prompt": IDS, "logprobs": 1, "logprob_token_ids": [7, 8]},
    "of-ids-alone": {"prompt": IDS, "logprob_token_ids": [7, 8]},
    "too-many-stream": {"prompt": IDS, "logprobs": 30, "stream": True},
    "without-special": {"prompt": WORDS, "add_special_tokens": False},
    "negative-id": {"prompt": [5, -1]},
    "chat-at-completions": {"messages": MESSAGES},
    "id-of-no-token": {"prompt": [5, 999999]},
    "too-long": {"prompt": [5] * 100_000},
}
_OF_CHAT: dict[str, dict[str, Any]] = {
    "turns": {"messages": TURNS},
    "other-role": {"messages": [{"role": "critic", "content": WORDS}]},
    "no-messages": {"messages": []},
    "newer-limit": {"messages": MESSAGES, "max_completion_tokens": 5},
    "chat-probabilities-0": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 0},
    "chat-probabilities-5": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5},
    "chat-probabilities-stream": {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 1,
        "stream": True,
    },
    "chat-too-many": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 30},
    "chat-top-alone": {"messages": MESSAGES, "top_logprobs": 3},
    "chat-top-0-alone": {"messages": MESSAGES, "top_logprobs": 0},
    "chat-all-probabilities": {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1},
    "chat-too-many-stream": {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 30,
        "stream": True,
    },
    "chat-of-ids": {"messages": MESSAGES, "logprobs": True, "logprob_token_ids": [7, 8]},
    "chat-echo": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "an dra"}],
        "echo": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "chat-echo-of-user": {"messages": MESSAGES, "echo": True},
    "chat-no-echo": {"messages": MESSAGES, "echo": False},
    "further-field-of-message": {
        "messages": [{"role": "user", "content": WORDS, "extra_field": "0"}]
    },
    "nameless-role": {"messages": [{"content": WORDS}]},
    "parts-of-no-kind": {"messages": [{"role": "user", "content": [{"text": WORDS}]}]},
    "tool-turns": {
        "messages": [
            {"role": "user", "content": WORDS},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "look", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "el an"},
        ]
    },
    "no-tools": {"messages": MESSAGES, "tools": []},
    "auto-without-tools": {"messages": MESSAGES, "tool_choice": "auto"},
    "no-choice-of-tools": {"messages": MESSAGES, "tools": [TOOL], "tool_choice": None},
    "tools-required-stream": {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 64,
        "stream": True,
    },
    "tool-by-name-stream": {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": NAMED,
        "max_tokens": 48,
        "stream": True,
    },
    "tool-or-constraint": {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": NAMED,
        "structured_outputs": {"regex": "a"},
    },
    "own-template": {"messages": MESSAGES, "chat_template": "{{ messages[-1].content }}"},
    "documents": {"messages": MESSAGES, "documents": [{"title": "a", "text": "vor"}]},
    "effort": {"messages": MESSAGES, "reasoning_effort": "low"},
    "no-effort": {"messages": MESSAGES, "reasoning_effort": "endless"},
    "hidden-reasoning": {"messages": MESSAGES, "include_reasoning": False},
    "special-of-chat": {"messages": MESSAGES, "add_special_tokens": True},
    "prompt-text": {"messages": MESSAGES, "return_prompt_text": True},
    "last-alone": {"messages": MESSAGES, "continue_final_message": True},
    "text-at-chat": {"prompt": WORDS},
    "tools": {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"},
    "tools-none": {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"},
    "tools-required": {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 64,
    },
    "tool-by-name": {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": NAMED,
        "max_tokens": 48,
    },
    "tool-of-nobody": {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "nothing"}},
    },
    "choice-without-tools": {"messages": MESSAGES, "tool_choice": NAMED},
    "own-arguments": {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}},
    "unfinished": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "an"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}
CASES = [*_cases()]


class Refusal(NamedTuple):
    field: str  # Empty: none is named.
    code: str  # Of OpenAI's; vLLM has the status there, which is none.
    message: str


@dataclass(frozen=True)
class Answer:
    status: int
    events: list[Any]  # Of a stream, each; else the whole.
    is_whole: bool = True  # A stream has its last event.

    @property
    def shape(self) -> Any:
        """The shape of the answer, or of all events together: engines cut a text as they please."""
        if self.status != 200:
            return {"error": {"message": "str"}}
        merged: Any = {}
        for event in self.events:
            merged = _merged(merged, _shape(event))
        return merged

    @property
    def said(self) -> dict[int, tuple[str, str | None]]:
        """By choice: its text, with what it calls, and its finish reason."""
        found: dict[int, tuple[str, str | None]] = {}
        for event in self.events:
            for choice in event.get("choices", ()):
                said = choice.get("message") or choice.get("delta") or choice
                calls = [
                    (call.get("function") or {}).get(part) or ""
                    for call in said.get("tool_calls") or ()
                    for part in ("name", "arguments")
                ]
                text = (said.get("content") or said.get("text") or "") + "".join(calls)
                before, reason = found.get(choice["index"], ("", None))
                found[choice["index"]] = before + text, choice.get("finish_reason") or reason
        return found

    @property
    def refusal(self) -> "Refusal":
        error = next(event["error"] for event in self.events if "error" in event)
        code = error.get("code")
        return Refusal(
            _root(error.get("param") or ""),
            code if isinstance(code, str) else "",
            error["message"],
        )

    @property
    def usage(self) -> tuple[int, int] | None:
        """Tokens of prompt and output."""
        usages = [event["usage"] for event in self.events if event.get("usage")]
        if not usages:
            return None
        return usages[-1]["prompt_tokens"], usages[-1]["completion_tokens"]


async def ask(http: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Answer:
    async with http.post(url + path, json=body) as response:
        raw = await response.read()
    if response.status != 200 or not body.get("stream"):
        return Answer(response.status, [json.loads(raw)])
    lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    error = next((event["error"] for event in events if "error" in event), None)
    if error is not None:  # vLLM finds some faults after the status line.
        return Answer(int(error.get("code") or 400), events)
    return Answer(200, events, is_whole=lines[-1:] == ["[DONE]"])


def missing(alone: Any, behind: Any, where: str = "") -> list[str]:
    """Fields that an answer has only alone, or of another type behind kvrs. A null is no field."""
    if isinstance(alone, dict) and isinstance(behind, dict):
        return [
            each
            for name, value in alone.items()
            for each in missing(value, behind.get(name), f"{where}.{name}")
        ]
    if alone in (None, behind) or (alone, behind) in (("int", "float"), ("float", "int")):
        return []
    return [f"{where}: {alone}, and here {behind}"]


def refused_otherwise(alone: Answer, behind: Answer) -> list[str]:
    """Why a refusal is not that of the server alone. It names the same field, or has the same code;
    where the server has no field in `param`, it names one of its message, or none.
    """
    if alone.status == 200:
        return []
    due, found = alone.refusal, behind.refusal
    if due.field:
        is_same = found.field == due.field
    else:
        is_same = not found.field or bool(re.search(rf"\b{re.escape(found.field)}\b", due.message))
    is_same |= bool(due.code) and found.code == due.code
    return [] if is_same else [f"{due}, and here {found}"]


def _root(field: str) -> str:
    """The first name of a path: `messages` in `messages[0].content` or `body.messages.0`."""
    return re.split(r"[.\[]", field.removeprefix("body."), maxsplit=1)[0]


# Which process did the work, and what it says of itself.
_OWN = frozenset({"kv_transfer_params", "kvrs", "system_fingerprint", "service_tier"})


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(each) for name, each in value.items() if name not in _OWN}
    if isinstance(value, list):
        merged: Any = {}
        for each in value:
            merged = _merged(merged, _shape(each))
        return {"[]": merged} if value else {"[]": {}}
    return None if value is None else type(value).__name__


def _merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _merged(one.get(name), other.get(name)) for name in (*one, *other)}
    return other if one in (None, {}) else one
