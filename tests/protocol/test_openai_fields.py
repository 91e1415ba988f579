"""The table of body fields: complete, and the only way to an engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from kvrs.errors import RequestError
from kvrs.protocol.openai.fields import (
    BACKENDS,
    DISTSERVE,
    EMBEDDED,
    FIELDS,
    SGLANG,
    VLLM,
    ApiKind,
    Seam,
    Treatment,
    check_fields,
    inexact_fields,
    rows,
    takes,
)
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest, read_request


def names(text: str) -> list[str]:
    return text.split()


# Fields of the request classes of vLLM, at commit 002032ee (2026-09), beside OpenAI's:
# vllm/entrypoints/openai/completion/protocol.py and chat_completion/protocol.py.
VLLM_BOTH = names("""
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens
    priority prompt_logprobs repetition_detection repetition_penalty request_id response_format
    return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens
    stop_token_ids stream stream_interval structured_outputs thinking_token_budget top_k
    truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
""")
VLLM_FIELDS = {
    ApiKind.COMPLETIONS: [*VLLM_BOTH, "prompt_embeds"],
    ApiKind.CHAT: [
        *VLLM_BOTH,
        *("add_generation_prompt", "chat_template", "chat_template_kwargs"),
        *("continue_final_message", "documents", "include_reasoning", "media_io_kwargs"),
        *("mm_processor_kwargs", "reasoning_effort", "return_prompt_text"),
    ],
}
OPENAI_FIELDS = {
    ApiKind.COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
    ApiKind.CHAT: chat_create_params.CompletionCreateParamsBase,
}
# What names an instance, a process, another tenant or the KV of a stream, at vLLM, SGLang, Dynamo
# and TensorRT-LLM.
INTERNAL = names("""
    kvrs kv_transfer_params ec_transfer_params vllm_xargs request_id rid priority lora_request
    lora_path data_parallel_rank routed_dp_rank disagg_prefill_dp_rank disaggregated_params
    disagg_request_id bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key extra_key
    disagg_anything_new
""")
DROPPED = {"kvrs", "kv_transfer_params"}


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


@pytest.mark.parametrize("api", ApiKind)
def test_every_field_of_openai_s_client_and_of_vllm_is_known(api: ApiKind) -> None:
    """A field that a newer release adds is decided on, and not refused unseen."""
    openai = OPENAI_FIELDS[api].__annotations__
    known = {row.name for row in FIELDS if row.api in (None, api)}

    assert len(openai) >= {ApiKind.COMPLETIONS: 17, ApiKind.CHAT: 36}[api]
    assert sorted(openai.keys() - known) == []
    assert sorted({*VLLM_FIELDS[api]} - known) == []


def test_each_field_has_one_row_at_each_endpoint() -> None:
    for api in ApiKind:
        names = [row.name for row in FIELDS if row.api in (None, api)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("api", "request_class"),
    [(ApiKind.COMPLETIONS, CompletionRequest), (ApiKind.CHAT, ChatRequest)],
)
def test_what_is_understood_is_decoded(api: ApiKind, request_class: Any, backend: str) -> None:
    """No field that kvrs calls understood is ignored, and no decoded one is left out of the
    table.
    """
    decoded = set(request_class.__struct_encode_fields__) - {"kvrs", "kv_transfer_params"}
    here = {name: row for name, row in rows(api).items() if row.api in (None, api)}

    understood = {
        name for name, row in here.items() if row.treatment(backend) is Treatment.UNDERSTOOD
    }

    assert understood <= decoded
    # DistServe's engine is greedy, the embedded one has no biases; vLLM and SGLang read formats of
    # their own, and SGLang's templates no documents.
    biases = {"logit_bias", "allowed_token_ids", "bad_words"}
    others = {
        EMBEDDED: biases,
        DISTSERVE: {*biases, "response_format"},
        VLLM: {"response_format"},
        SGLANG: {
            *("response_format", "allowed_token_ids", "bad_words"),
            *("documents", "add_generation_prompt"),
        },
    }
    assert decoded - understood <= others.get(backend, set())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("api", ApiKind)
@pytest.mark.parametrize("name", INTERNAL)
def test_internal_fields_reach_no_engine(name: str, api: ApiKind, backend: str) -> None:
    """A client names neither the writer of a stream, nor where it runs, nor where its KV is."""
    given = {name: raw({"remote_host": "10.0.0.1"}), "max_tokens": raw(3)}

    if name in DROPPED:
        assert set(check_fields(given, api, backend)) == {"max_tokens"}
        return
    with pytest.raises(RequestError) as refusal:
        check_fields(given, api, backend)

    assert refusal.value.param == name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("api", ApiKind)
def test_what_is_not_known_is_refused_with_what_is_allowed(api: ApiKind, backend: str) -> None:
    """Each allowed field is named, and each is one that the backend takes."""
    with pytest.raises(RequestError) as refusal:
        check_fields({"temprature": raw(0)}, api, backend)

    listed, _, near = str(refusal.value).partition("allowed: ")[2].partition("; ")
    allowed = listed.split(", ")
    assert near == "the nearest one is temperature"
    assert refusal.value.param == "temprature"
    assert tuple(allowed) == takes(api, backend)
    assert {"temperature", "model", "seed"} <= set(allowed)
    assert not {*INTERNAL} & set(allowed)
    assert set(check_fields({"temprature": raw(None)}, api, backend)) == set()


def refused_everywhere() -> Iterator[str]:
    for row in FIELDS:
        if row.api is None and {row.treatment(b) for b in BACKENDS} == {Treatment.REFUSED}:
            yield row.name


@pytest.mark.parametrize("name", sorted(set(refused_everywhere())))
def test_what_no_engine_serves_is_refused_by_name(name: str) -> None:
    """With the values that would be taken, and the field that does the same, if there is one."""
    row = rows(ApiKind.CHAT)[name]

    with pytest.raises(RequestError) as refusal:
        check_fields({name: raw({"a": 1})}, ApiKind.CHAT, VLLM)

    assert refusal.value.param == name
    assert "null" in str(refusal.value)
    assert row.instead in str(refusal.value)
    for value in row.neutral:
        assert check_fields({name: raw(value)}, ApiKind.CHAT, VLLM) == {}


# What vLLM serves and got 400 before, beside what kvrs itself decodes.
SERVED_AT_VLLM: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "tool_choice": "required",
    "logit_bias": {"5": 1},
    "min_p": 0.1,
    "bad_words": ["x"],
    "allowed_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "return_tokens_as_token_ids": True,
    "include_reasoning": False,
    "chat_template": "{{ messages }}",
    "add_generation_prompt": False,
    "continue_final_message": True,
    "documents": [{"title": "a", "text": "b"}],
    "thinking_token_budget": 5,
    "reasoning_effort": "low",
    "parallel_tool_calls": False,
}


@pytest.mark.parametrize("name", SERVED_AT_VLLM)
def test_what_vllm_serves_is_passed_on(name: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], name: SERVED_AT_VLLM[name]}

    _, fields, _ = read_request(msgspec.json.encode(body), ApiKind.CHAT, VLLM)

    assert msgspec.json.decode(fields[name]) == SERVED_AT_VLLM[name]


@pytest.mark.parametrize(
    ("name", "exactly"),
    [
        ("logit_bias", True),
        ("min_p", True),
        ("allowed_token_ids", True),
        ("bad_words", False),
        ("response_format", False),
        ("structured_outputs", False),
        ("thinking_token_budget", False),
        ("include_stop_str_in_output", False),
    ],
)
def test_the_table_says_which_fields_break_at_a_seam(name: str, exactly: bool) -> None:
    """Those whose state an engine loses that takes the history for a prompt: it counts or matches
    its own output only. A function of the logits has none.
    """
    assert inexact_fields([name, "max_tokens"], ApiKind.COMPLETIONS) == ([] if exactly else [name])


def test_a_grammar_is_not_begun_again_at_a_seam() -> None:
    """After half an object an engine would write a whole one."""
    guided = {row.name for row in FIELDS if row.seam is Seam.AGAIN}

    assert guided == {"response_format", "structured_outputs", "regex", "ebnf", "json_schema"}


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" * 60])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_out_of_range_is_no_neutral_value(number: str, backend: str) -> None:
    """JSON has it, Python's floats do not; and a neutral value was all that was asked."""
    for row in FIELDS:
        if not row.neutral or row.api not in (None, ApiKind.CHAT):
            continue
        given = {row.name: msgspec.Raw(number.encode())}
        if row.treatment(backend) is Treatment.REFUSED:
            with pytest.raises(RequestError, match=f"{row.name}(=|: ).* is not supported"):
                check_fields(given, ApiKind.CHAT, backend)
        else:
            check_fields(given, ApiKind.CHAT, backend)


def test_fields_about_accounts_are_taken_and_kept_from_engines() -> None:
    """No output depends on them."""
    given = {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "user": "u"}

    for backend in BACKENDS:
        _, fields, _ = read_request(
            msgspec.json.encode(given | {"prompt": "x"}), ApiKind.COMPLETIONS, backend
        )
        assert set(fields) == {"prompt", "user"}


def test_a_choice_of_tools_is_served_where_output_is_guided() -> None:
    """A call that must be made needs it."""
    body = {"messages": [{"role": "user"}], "tool_choice": "required"}

    for backend in (VLLM, SGLANG):
        read_request(msgspec.json.encode(body), ApiKind.CHAT, backend)
    for backend in (EMBEDDED, DISTSERVE):
        with pytest.raises(RequestError, match="guided decoding"):
            read_request(msgspec.json.encode(body), ApiKind.CHAT, backend)


def documented() -> str:
    """The table of docs/guide/openai.md."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for row in FIELDS:
        where = "both" if row.api is None else row.api.value
        treatments = [row.treatment(backend).value for backend in BACKENDS]
        taken = (Treatment.UNDERSTOOD, Treatment.PASSED)
        served = row.vllm in taken or row.sglang in taken
        seam = row.seam.value if served else ""
        values = ", ".join(f"`{msgspec.json.encode(each).decode()}`" for each in row.neutral)
        shown = f"`{row.name}`" + (f" ({values})" if values else "")
        grouped.setdefault((where, *treatments, seam), []).append(shown)
    head = ["fields", "endpoint", *BACKENDS, "after a cut (not embedded)"]
    lines = [head, ["---"] * len(head)]
    lines += [[", ".join(fields), *rest] for rest, fields in grouped.items()]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def test_the_guide_has_the_table() -> None:
    """It is generated from the code by the function above."""
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "openai.md").read_text()

    assert documented() in guide
