"""JSON mode: which tokens may come next, by the grammar of `response_format`.

A grammar's state depends on the schema and the output tokens alone, so an attempt that continues a
stream elsewhere builds it from the history. The mask is applied last and wins over what else
forbids tokens.
"""

import json
import threading
from decimal import Decimal
from functools import cached_property
from math import lcm
from typing import Any, Literal

import msgspec
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from torch import Tensor

from kvrs.errors import RequestError
from kvrs.protocol.openai.requests import decode_as

_PARAM = "response_format"
_ANY_OBJECT = {"type": "object"}
_SHOWN_CHARACTERS = 300  # Of what is wrong with a schema, or with its output.
# llguidance follows references by recursion. Twice as many levels overflow a stack of 8 MB, which
# ends the process.
_MAX_LEVELS = 2000
# A number that is a multiple of n has an automaton of n states, which llguidance makes whole, with
# none of its limits; the time grows faster than n.
_MAX_STATES = 20_000


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any] = {}
    name: str = ""
    description: str | None = None
    strict: bool | None = None  # The output follows the schema in any case.


class _Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


_FORMAT = msgspec.json.Decoder(_Format | None)


class Grammar:
    """The grammar of one stream."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def failure(self) -> str:
        """Why it can say no more; empty while it can."""
        return self._matcher.get_error()[:_SHOWN_CHARACTERS]

    def apply(self, row: Tensor, logits: Tensor) -> Tensor:
        """Logits `[vocab]` without the tokens that the grammar forbids; those of the model, where
        others have forbidden all that it allows.
        """
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        forbidden = allowed[: len(row)] == 0
        masked = row.masked_fill(forbidden, -torch.inf)
        if bool(torch.isfinite(masked).any()):
            return masked
        return logits.masked_fill(forbidden, -torch.inf)

    def take(self, token_id: int) -> bool:
        """Go on behind an output token; whether the grammar allows it."""
        return bool(self._matcher.consume_token(token_id))


class Grammars:
    """Makes the grammars of one model's streams."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        # A large one takes a second. Tokenizers may have tokens that the weights do not have.
        tokens = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        return LLTokenizer(
            self._tokenizer.to_str(),
            n_vocab=max(self._vocab_size, tokens),
            eos_token=self._eos_token_ids,
        )

    def grammar(self, response_format: msgspec.Raw) -> Grammar | None:
        """The grammar at the beginning of the output; None: any text is allowed. Not to be called
        on the event loop.

        Raises:
            RequestError: the format is malformed, or its schema has what is not supported.
        """
        asked = decode_as(_FORMAT, bytes(response_format), _PARAM)
        if asked is None or asked.type == "text":
            return None
        if not self._eos_token_ids:
            raise RequestError("the model has no token that ends an output", param=_PARAM)
        schema: dict[str, Any] = _ANY_OBJECT
        if asked.type == "json_schema":
            if asked.json_schema is None:
                raise RequestError("json_schema is missing", param=f"{_PARAM}.json_schema")
            schema = asked.json_schema.schema
        if (levels := _levels(schema)) > _MAX_LEVELS:
            raise RequestError(
                f"different $ref, and one, times its depth are {levels}; allowed: at most "
                f"{_MAX_LEVELS}",
                param=f"{_PARAM}.json_schema.schema",
            )
        if (states := _states(schema)) > _MAX_STATES:
            raise RequestError(
                f"multipleOf: the least common multiple of all, as whole numbers without the point "
                f"(1.25 is 125), times how many of them and $ref there are, is "
                f"{min(states, 10**18)}; allowed: at most {_MAX_STATES}",
                param=f"{_PARAM}.json_schema.schema",
            )
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        with self._lock:
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            cause = matcher.get_error()[:_SHOWN_CHARACTERS]
            raise RequestError(
                f"the schema is not supported: {cause}", param=f"{_PARAM}.json_schema.schema"
            )
        return Grammar(matcher)


def _levels(schema: dict[str, Any]) -> int:
    """How deep a schema can be at most where its references are followed, each once."""
    references, depth, level = set(), 0, list[Any]([schema])
    while level:
        depth += 1
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
                if isinstance(reference := value.get("$ref"), str):
                    references.add(reference)
            elif isinstance(value, list):
                below += value
        level = below
    return depth * (len(references) + 1)


def _states(schema: dict[str, Any]) -> int:
    """How many the numbers of a schema that are to be multiples of others can have at most: of two
    that are both to hold, the least common multiple, and each reference may add others.
    """
    common, number, references = 1, 0, 0
    values: list[Any] = [schema]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            values += value.values()
            references += isinstance(value.get("$ref"), str)
            of = value.get("multipleOf")
            if isinstance(of, int | float) and of > 0:
                number += 1
                common = lcm(common, of if isinstance(of, int) else _without_point(of))
                if common > _MAX_STATES:
                    return common
    return common * (number + references) if number else 0


def _without_point(number: float) -> int:
    """1.25 is 125, and 100.0 is 100."""
    exact = Decimal(repr(number))
    _, digits, exponent = exact.normalize().as_tuple()
    assert isinstance(exponent, int)
    zeros: int = 10 ** max(0, exponent)
    return int("".join(map(str, digits))) * zeros
