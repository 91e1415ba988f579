"""Table of all body fields of the OpenAI API's two endpoints and of vLLM's extensions, with each
backend's treatment of them. A field outside the table is refused.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any

import msgspec

from kvrs.errors import RequestError, UnknownFieldError
from kvrs.protocol.openai.decoding import given_as

# Backends, as `cluster.backend` names them.
EMBEDDED, DISTSERVE, VLLM, SGLANG = "embedded", "distserve", "vllm", "sglang"
BACKENDS = (EMBEDDED, DISTSERVE, VLLM, SGLANG)


class ApiKind(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class Treatment(StrEnum):
    # kvrs decodes and checks the field, and sends it to engines that need it.
    UNDERSTOOD = "understood"
    PASSED = "passed"  # The engine gets the field undecoded, and checks it.
    # The engine gets the field as with PASSED; one engine answers the whole request, without a
    # hand-off, and no other one continues it.
    WHOLE = "whole"
    IGNORED = "ignored"  # No output depends on the field, and no engine gets it.
    REFUSED = "refused"
    INTERNAL = "internal"  # Proxies set the field; a client's value is dropped.


class Seam(StrEnum):
    """Effect of a field on a stream that continues at another engine, whose prompt is the history;
    the seam is the end of the history.
    """

    EXACT = "exact"
    # The engine gets the field again, but counts from the seam, so its output may differ.
    INEXACT = "inexact"
    # The stream has no seam: the field would start anew there, so the request runs once more.
    AGAIN = "again"


class BodyField(msgspec.Struct, frozen=True):
    """A row of the table: one field and each backend's treatment of it. A value in `neutral` counts
    as an absent field.
    """

    name: str
    embedded: Treatment
    distserve: Treatment
    vllm: Treatment
    sglang: Treatment
    api: ApiKind | None = None  # The only endpoint that accepts the field; None: both.
    seam: Seam = Seam.EXACT
    of_output: bool = False  # Only decode gets the field, since prefill has no output.
    of_text: bool = (
        # True: the field is about tokenising a prompt, so an engine that gets token ids does not
        # get it.
        False
    )
    neutral: tuple[Any, ...] = ()
    instead: str = ""  # Another field with the same effect, named in the refusal.
    null_counts: bool = False  # Null is not left out, as vLLM distinguishes it from absence.

    def treatment(self, backend: str) -> Treatment:
        match backend:
            case "embedded":
                return self.embedded
            case "distserve":
                return self.distserve
            case "sglang":
                return self.sglang
            case _:
                return self.vllm


_COMPLETIONS, _CHAT = ApiKind.COMPLETIONS, ApiKind.CHAT
_U, _P = Treatment.UNDERSTOOD, Treatment.PASSED
_I, _R = Treatment.IGNORED, Treatment.REFUSED
_EVERYWHERE, _NOWHERE, _NEUTRAL = (_U,) * 4, (_R,) * 4, (_I,) * 4
_VLLM_ONLY, _SGLANG_ONLY, _STOCK = (_R, _R, _P, _R), (_R, _R, _R, _P), (_R, _R, _P, _P)
_BUT_SGLANG = (_U, _U, _U, _R)
_VLLM_WHOLE = (_R, _R, Treatment.WHOLE, _R)
_INTERNAL = (Treatment.INTERNAL,) * 4
_INEXACT, _AGAIN = Seam.INEXACT, Seam.AGAIN

# All fields. Rules on more than one field are in kvrs/proxy/wire/exactness.py.
FIELDS: tuple[BodyField, ...] = (
    # Field of the prompt.
    BodyField("prompt", *_EVERYWHERE, _COMPLETIONS),
    BodyField("messages", *_EVERYWHERE, _CHAT),
    BodyField("tools", *_EVERYWHERE, _CHAT),
    BodyField("tool_choice", *_EVERYWHERE, _CHAT, null_counts=True),
    BodyField("parallel_tool_calls", *_EVERYWHERE, _CHAT),
    BodyField("reasoning_effort", *_EVERYWHERE, _CHAT),
    BodyField("chat_template_kwargs", *_EVERYWHERE, _CHAT),
    BodyField("chat_template", *_VLLM_ONLY, _CHAT),
    BodyField("documents", *_BUT_SGLANG, _CHAT, neutral=([],)),
    BodyField("add_generation_prompt", *_BUT_SGLANG, _CHAT, neutral=(True,)),
    BodyField("continue_final_message", *_STOCK, _CHAT, neutral=(False,)),
    BodyField("media_io_kwargs", *_VLLM_ONLY, _CHAT),
    BodyField("mm_processor_kwargs", *_VLLM_ONLY, _CHAT),
    BodyField("add_special_tokens", *_VLLM_ONLY, _COMPLETIONS, of_text=True, neutral=(True,)),
    BodyField("add_special_tokens", *_VLLM_ONLY, _CHAT, neutral=(False,)),
    BodyField("truncate_prompt_tokens", *_VLLM_ONLY, of_text=True),
    BodyField("truncation_side", *_VLLM_ONLY, of_text=True),
    BodyField("prompt_embeds", *_NOWHERE),
    BodyField("cache_salt", *_EVERYWHERE),
    # Fields about the length of the output.
    BodyField("max_tokens", *_EVERYWHERE),
    BodyField("max_completion_tokens", *_EVERYWHERE, _CHAT, of_output=True),
    BodyField("min_tokens", *_EVERYWHERE, of_output=True),
    BodyField("stop", *_EVERYWHERE, of_output=True),
    BodyField("stop_token_ids", *_EVERYWHERE, of_output=True),
    BodyField("ignore_eos", *_EVERYWHERE),
    BodyField("stop_regex", *_SGLANG_ONLY, seam=_INEXACT, of_output=True),
    BodyField("no_stop_trim", *_SGLANG_ONLY, seam=_INEXACT, of_output=True, neutral=(False,)),
    BodyField("thinking_token_budget", *_VLLM_ONLY, seam=_INEXACT, of_output=True),
    BodyField("repetition_detection", *_VLLM_ONLY, seam=_INEXACT, of_output=True),
    # Fields about the choice of the next token.
    BodyField("temperature", *_EVERYWHERE),
    BodyField("top_p", *_EVERYWHERE),
    BodyField("top_k", *_EVERYWHERE),
    BodyField("min_p", *_EVERYWHERE, of_output=True),
    BodyField("seed", *_EVERYWHERE, of_output=True),
    BodyField("presence_penalty", *_EVERYWHERE, of_output=True),
    BodyField("frequency_penalty", *_EVERYWHERE, of_output=True),
    BodyField("repetition_penalty", *_EVERYWHERE, of_output=True),
    BodyField("logit_bias", _R, _R, _U, _U, of_output=True, neutral=({},)),
    BodyField("allowed_token_ids", _R, _R, _U, _R, of_output=True),
    # Not exact when continued: a bad word of several tokens may begin before the seam.
    BodyField("bad_words", _R, _R, _U, _R, seam=_INEXACT, of_output=True, neutral=([],)),
    BodyField("watermarking", *_VLLM_ONLY, seam=_INEXACT, of_output=True, neutral=(False,)),
    BodyField("response_format", _U, _R, _P, _P, seam=_AGAIN, neutral=({"type": "text"},)),
    BodyField("structured_outputs", *_VLLM_ONLY, seam=_AGAIN, of_output=True),
    BodyField("regex", *_SGLANG_ONLY, seam=_AGAIN, of_output=True),
    BodyField("ebnf", *_SGLANG_ONLY, seam=_AGAIN, of_output=True),
    BodyField("json_schema", *_SGLANG_ONLY, _COMPLETIONS, seam=_AGAIN, of_output=True),
    BodyField("guided_json", *_NOWHERE, instead="structured_outputs"),
    BodyField("guided_regex", *_NOWHERE, instead="structured_outputs"),
    BodyField("guided_choice", *_NOWHERE, instead="structured_outputs"),
    BodyField("guided_grammar", *_NOWHERE, instead="structured_outputs"),
    BodyField("guided_decoding_backend", *_NOWHERE),
    BodyField("guided_whitespace_pattern", *_NOWHERE),
    BodyField("use_beam_search", *_VLLM_WHOLE, neutral=(False,)),
    BodyField("length_penalty", *_VLLM_WHOLE, neutral=(1,)),
    BodyField("best_of", *_NOWHERE, neutral=(1,)),
    BodyField("logits_processors", *_NOWHERE, neutral=([],)),
    BodyField("suffix", *_NOWHERE, neutral=("",)),
    # Fields about the contents of the answer.
    BodyField("n", *_EVERYWHERE),
    BodyField("echo", *_EVERYWHERE, _COMPLETIONS),
    BodyField("echo", *_VLLM_WHOLE, _CHAT, neutral=(False,)),
    BodyField("stream", *_EVERYWHERE),
    BodyField("stream_options", *_EVERYWHERE),
    BodyField("stream_interval", *_VLLM_ONLY, of_output=True),
    BodyField("logprobs", *_EVERYWHERE, _COMPLETIONS, of_output=True),
    BodyField("logprobs", *_EVERYWHERE, _CHAT, of_output=True),
    BodyField("top_logprobs", *_EVERYWHERE, _CHAT, of_output=True),
    BodyField("logprob_token_ids", *_VLLM_ONLY, of_output=True),
    BodyField("return_tokens_as_token_ids", *_VLLM_ONLY, of_output=True, neutral=(False,)),
    BodyField("prompt_logprobs", *_VLLM_WHOLE),
    BodyField("return_token_ids", *_EVERYWHERE),
    BodyField("return_prompt_text", *_NOWHERE, _COMPLETIONS, neutral=(False,)),
    BodyField("return_prompt_text", *_VLLM_WHOLE, _CHAT, neutral=(False,)),
    BodyField("routed_experts_prompt_start", *_NOWHERE, neutral=(0,)),
    BodyField("separate_reasoning", *_SGLANG_ONLY, _CHAT, seam=_INEXACT, neutral=(True,)),
    BodyField("stream_reasoning", *_SGLANG_ONLY, _CHAT, seam=_INEXACT, neutral=(True,)),
    BodyField("include_reasoning", *_VLLM_ONLY, _CHAT, seam=_INEXACT, neutral=(True,)),
    BodyField(
        "include_stop_str_in_output", *_VLLM_ONLY, seam=_INEXACT, of_output=True, neutral=(False,)
    ),
    BodyField("skip_special_tokens", *_STOCK, seam=_INEXACT, of_output=True, neutral=(True,)),
    BodyField(
        "spaces_between_special_tokens", *_VLLM_ONLY, seam=_INEXACT, of_output=True, neutral=(True,)
    ),
    # Fields for OpenAI's own service.
    BodyField("model", *_EVERYWHERE),
    BodyField("user", *_EVERYWHERE),
    BodyField("store", *_NEUTRAL),
    BodyField("metadata", *_NEUTRAL),
    BodyField("service_tier", *_NEUTRAL),
    BodyField("safety_identifier", *_NEUTRAL),
    BodyField("prompt_cache_key", *_NEUTRAL),
    BodyField("prompt_cache_options", *_NEUTRAL),
    BodyField("prompt_cache_retention", *_NEUTRAL),
    BodyField("prediction", *_NEUTRAL),
    BodyField("functions", *_NOWHERE, neutral=([],), instead="tools"),
    BodyField("function_call", *_NOWHERE, neutral=("none", "auto"), instead="tool_choice"),
    BodyField("modalities", *_NOWHERE, neutral=(["text"],)),
    BodyField("audio", *_NOWHERE),
    BodyField("verbosity", *_NOWHERE, neutral=("medium",)),
    BodyField("web_search_options", *_NOWHERE),
    BodyField("moderation", *_NOWHERE),
    # Fields for vLLM's book-keeping.
    BodyField("session_id", *_NEUTRAL),
    BodyField("return_token_offsets", *_NEUTRAL),
    BodyField("return_mm_kwargs", *_NEUTRAL),
    BodyField("mm_payload", *_NEUTRAL),
    # Fields about the instance, client and KV of a stream.
    BodyField("kvrs", *_INTERNAL),
    BodyField("kv_transfer_params", *_INTERNAL),
    BodyField("ec_transfer_params", *_NOWHERE),
    # Not passed on from clients, because it may hold `kv_transfer_params`.
    BodyField("vllm_xargs", *_NOWHERE),
    BodyField("request_id", *_NOWHERE),
    BodyField("priority", *_NOWHERE, neutral=(0,)),
    BodyField("lora_request", *_NOWHERE),
    *(
        BodyField(name, *_NOWHERE)
        for name in (
            *("rid", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
            *("disaggregated_params", "disagg_request_id", "extra_key", "lora_path"),
            *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
            *("kv_hints", "session_params", "custom_logit_processor", "custom_params", "input_ids"),
        )
    ),
)

NOT_FOR_PREFILL = frozenset(row.name for row in FIELDS if row.of_output)
NOT_FOR_IDS = frozenset(row.name for row in FIELDS if row.of_text)
# Fields of chats only, left out when a chat is continued as a completion.
NOT_FOR_COMPLETIONS = frozenset(row.name for row in FIELDS if row.api is ApiKind.CHAT)
# Fields whose output is not continued from its ids.
ONLY_AGAIN = frozenset(row.name for row in FIELDS if row.seam is Seam.AGAIN)

_NULLS_OF_VLLM = frozenset(row.name for row in FIELDS if row.null_counts)

_LONGEST_NEUTRAL_BYTES = 64
_ANY = msgspec.json.Decoder()


@cache
def rows(api: ApiKind) -> Mapping[str, BodyField]:
    """Return the row of each field for requests at an endpoint, by the field's name."""
    here = {row.name: row for row in FIELDS if row.api in (None, api)}
    return {row.name: row for row in FIELDS} | here


@cache
def whole(api: ApiKind) -> frozenset[str]:
    """Return the names of fields with treatment WHOLE: a request with one is answered by one engine
    in one piece.
    """
    return frozenset(name for name, row in rows(api).items() if row.vllm is Treatment.WHOLE)


@cache
def takes(api: ApiKind, backend: str) -> tuple[str, ...]:
    """Return the names of the fields that a client may set, in alphabetical order."""
    away = (Treatment.REFUSED, Treatment.INTERNAL)
    return tuple(
        sorted(
            name
            for name, row in rows(api).items()
            if row.api in (None, api) and row.treatment(backend) not in away
        )
    )


@cache
def kept_as_they_are(api: ApiKind, backend: str) -> frozenset[str]:
    """Return the names of fields that `check_fields` keeps with any value except null."""
    kept = (Treatment.UNDERSTOOD, Treatment.PASSED, Treatment.WHOLE)
    return frozenset(
        name
        for name, row in rows(api).items()
        if row.api in (None, api) and not row.neutral and row.treatment(backend) in kept
    )


def check_fields(
    given: Mapping[str, msgspec.Raw], api: ApiKind, backend: str
) -> dict[str, msgspec.Raw]:
    """Return the given fields that kvrs or the backend's engine uses, undecoded.

    Raises:
        RequestError: a field is refused, or (UnknownFieldError) unknown.
    """
    kept: dict[str, msgspec.Raw] = {}
    unknown: str | None = None
    as_they_are = kept_as_they_are(api, backend)
    for name, value in given.items():
        # Leave the field out: null means absence, but not every engine accepts null.
        if len(value) == 4 and bytes(value) == b"null":
            if backend == VLLM and name in _NULLS_OF_VLLM:
                kept[name] = value
            continue
        if name in as_they_are:
            kept[name] = value
            continue
        if (row := rows(api).get(name)) is None:
            unknown = unknown or name
            continue
        if _is_neutral(value, row):
            continue
        treatment = row.treatment(backend)
        if treatment is Treatment.REFUSED or row.api not in (None, api):
            raise not_supported(name, value, row.neutral, row.instead)
        if treatment in (Treatment.UNDERSTOOD, Treatment.PASSED, Treatment.WHOLE):
            kept[name] = value
    if unknown is not None:
        raise UnknownFieldError(unknown, takes(api, backend))
    return kept


def inexact_fields(names: Iterable[str], api: ApiKind) -> list[str]:
    """Return those of `names` that prevent an exact continuation with any value."""
    known = rows(api)
    return [name for name in names if known[name].seam is not Seam.EXACT]


def not_supported(
    name: str, given: msgspec.Raw | bytes, neutral: Iterable[Any], instead: str = ""
) -> RequestError:
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in (*neutral, None))
    hint = f", or the field {instead}" if instead else ""
    return RequestError(
        f"{given_as(name, given)} is not supported; allowed: {allowed}{hint}", param=name
    )


def _is_neutral(value: msgspec.Raw, row: BodyField) -> bool:
    """True if the value is in `row.neutral`, so that the field changes nothing. Long values are
    never neutral and stay undecoded.
    """
    if not row.neutral or len(value) > _LONGEST_NEUTRAL_BYTES:
        return False
    try:
        return is_among(_ANY.decode(value), row.neutral)
    except msgspec.DecodeError:  # A number out of Python's range is not neutral.
        return False


def is_among(value: Any, allowed: Iterable[Any]) -> bool:
    """Return whether a value equals one of `allowed` as JSON compares: 1 equals 1.0, but
    not true.
    """
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
    )
