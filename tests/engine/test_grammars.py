"""JSON mode of the embedded engine: what it writes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # Its stubs are a package of their own.
import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from kvrs.errors import RequestError
from kvrs_engine.engine.grammars import Grammars
from kvrs_engine.engine.random_model import VOCAB
from tests.engine.serving import serving

pytestmark = pytest.mark.engine

END_ID = 1
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "bb", None]},
        "at": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "at"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


@pytest.mark.network
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_output_is_what_the_schema_says(tiny_model: Path, path: str) -> None:
    """A model that knows no JSON, sampled at a high temperature, ends with the grammar whatever
    else the request asks for.
    """
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "kalo"}]} if path == CHAT else {"prompt": "kalo"}
    )
    others: list[dict[str, Any]] = [
        {},
        {"ignore_eos": True},
        {"min_tokens": 190},
        {"frequency_penalty": 2.0},
    ]
    async with serving(tiny_model) as (_, client):
        for seed, other in enumerate(others):
            fields = {
                "max_tokens": 200,
                "temperature": 1.5,
                "seed": seed,
                "response_format": FORMAT,
            }
            answer = await (await client.post(path, json=asked | fields | other)).json()
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if path == CHAT else choice["text"]

            assert choice["finish_reason"] == "stop", (other, text)
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.network
async def test_json_object_is_any_object(tiny_model: Path) -> None:
    """Cut off by `max_tokens` it is the beginning of one, as at OpenAI."""
    body = {"prompt": "kalo", "temperature": 1.0, "response_format": {"type": "json_object"}}
    async with serving(tiny_model) as (_, client):
        for seed in range(4):
            asked = body | {"seed": seed, "max_tokens": 100}
            (choice,) = (await (await client.post(COMPLETIONS, json=asked)).json())["choices"]

            assert choice["text"].startswith("{")
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["text"]), dict)


@pytest.mark.network
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "yaml"}, "response_format.type"),
        ("json", "response_format"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}},
            "response_format.json_schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://localhost/x"}}},
            "response_format.json_schema",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "string", "pattern": "(?=x)"}},
            },
            "response_format.json_schema",
        ),
    ],
)
async def test_a_format_that_cannot_be_followed_is_refused(
    tiny_model: Path, wrong: Any, param: str
) -> None:
    """By the prefill call too, before anything is computed; no schema fetches anything."""
    transfer = {"do_remote_decode": True}
    async with serving(tiny_model) as (_, client):
        for more in ({}, {"kv_transfer_params": transfer, "max_tokens": 1}):
            answer = await client.post(
                COMPLETIONS, json={"prompt": "kalo", "response_format": wrong} | more
            )

            assert answer.status == 400
            assert (await answer.json())["error"]["param"].startswith(param)


@pytest.mark.network
async def test_a_grammar_that_fails_is_no_end(tiny_model: Path) -> None:
    """The beginning of an answer is not passed off as a whole one."""
    # No JSON follows it, which is found as the first token is sampled. So is in the middle of an
    # answer that a pattern has too many states.
    schema = {"name": "a", "schema": {"$ref": "#"}}
    body = {"prompt": "kalo", "response_format": {"type": "json_schema", "json_schema": schema}}
    async with serving(tiny_model) as (instance, client):
        answer = await client.post(COMPLETIONS, json=body | {"max_tokens": 9})
        other = await client.post(COMPLETIONS, json={"prompt": "kalo", "max_tokens": 2})

        assert answer.status == 500
        assert (await answer.json())["error"]["message"].startswith("response_format: ")
        assert other.status == 200
        assert instance.failed() is None


@pytest.mark.network
async def test_a_history_that_is_no_such_json_is_refused(tiny_model: Path) -> None:
    """It is not what an engine with the same request has written."""
    kvrs = {"stream": "s", "attempt": 2, "prompt_tokens": 2}
    body = {"prompt": [5, 6, 300], "kvrs": kvrs, "response_format": FORMAT, "max_tokens": 9}
    async with serving(tiny_model) as (_, client):
        answer = await client.post(COMPLETIONS, json=body)

        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "response_format"


def test_an_unknown_type_is_named_once_with_the_allowed_ones(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    grammars = Grammars(tokenizer, VOCAB, frozenset({END_ID}))

    with pytest.raises(RequestError) as refused:
        grammars.grammar(msgspec.Raw(b'{"type": "xml"}'))

    assert str(refused.value) == (
        'response_format.type="xml" is not supported; allowed: text, json_object, json_schema'
    )


def _chain(links: int) -> dict[str, Any]:
    """A schema of which each reference leads to another one."""
    parts: dict[str, Any] = {
        f"{number}": {"properties": {"a": {"$ref": f"#/$defs/{number + 1}"}}}
        for number in range(links)
    }
    return {"$ref": "#/$defs/0", "$defs": parts | {f"{links}": {"type": "null"}}}


def test_a_long_chain_of_references_is_refused(tiny_model: Path) -> None:
    """It is followed by recursion: the stack would end, and the process with it."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    grammars = Grammars(tokenizer, VOCAB, frozenset({END_ID}))

    def format_of(links: int) -> msgspec.Raw:
        schema = {"name": "chain", "schema": _chain(links)}
        return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))

    with pytest.raises(RequestError, match=r"\$ref"):
        grammars.grammar(format_of(2000))
    whole = grammars.grammar(format_of(200))
    assert whole is not None
    assert whole.take(tokenizer.encode("{", add_special_tokens=False).ids[0])


def test_a_grammar_built_from_the_history_allows_the_same(tiny_model: Path) -> None:
    """At every position, so that a recovery samples the same tokens."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    raw = msgspec.Raw(msgspec.json.encode(FORMAT))
    here, there = (Grammars(tokenizer, VOCAB, frozenset({END_ID})) for _ in range(2))
    whole = here.grammar(raw)
    assert whole is not None
    history: list[int] = []
    generator = torch.Generator().manual_seed(3)
    while True:
        row = torch.randn(VOCAB, generator=generator)
        again = there.grammar(raw)
        assert again is not None
        assert all(again.take(token_id) for token_id in history)
        masked = whole.apply(row, row)
        assert torch.equal(masked, again.apply(row, row))
        if (token_id := int(masked.argmax())) == END_ID:
            break
        history.append(token_id)
        assert whole.take(token_id)
    assert len(history) > 20
    jsonschema.validate(json.loads(tokenizer.decode(history)), SCHEMA)


@pytest.mark.parametrize("of", [99_991, 0.01])
def test_multiples_that_would_compile_for_long_are_refused(tiny_model: Path, of: float) -> None:
    """While a schema is compiled, no other one is. A property may have that name."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    grammars = Grammars(tokenizer, VOCAB, frozenset({END_ID}))

    def format_of(numbers: dict[str, Any]) -> msgspec.Raw:
        schema = {"properties": {"multipleOf": {"type": "number"} | numbers}}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        return msgspec.Raw(json.dumps(form).encode())

    with pytest.raises(RequestError, match="multipleOf is not supported") as refused:
        grammars.grammar(format_of({"multipleOf": of}))

    assert refused.value.param == "response_format.json_schema.schema"
    assert grammars.grammar(format_of({})) is not None


@pytest.mark.parametrize("vocab_size", [VOCAB - 12, VOCAB + 88])
def test_weights_may_have_another_vocabulary_than_the_tokenizer(
    tiny_model: Path, vocab_size: int
) -> None:
    """Fine-tuned checkpoints lack logits of added tokens; others have more for their alignment."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    grammar = Grammars(tokenizer, vocab_size, frozenset({END_ID})).grammar(
        msgspec.Raw(b'{"type":"json_object"}')
    )
    assert grammar is not None
    row = torch.zeros(vocab_size)

    allowed = torch.isfinite(grammar.apply(row, row)).nonzero().flatten().tolist()

    assert allowed == tokenizer.encode("{", add_special_tokens=False).ids


def test_a_model_without_an_end_token_has_no_json_mode(tiny_model: Path) -> None:
    """Nothing could end the output."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    grammars = Grammars(tokenizer, VOCAB, frozenset())

    with pytest.raises(RequestError, match="no token that ends"):
        grammars.grammar(msgspec.Raw(b'{"type":"json_object"}'))
    assert grammars.grammar(msgspec.Raw(b'{"type":"text"}')) is None
