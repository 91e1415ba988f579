"""JSON mode: the mask of allowed next tokens by the grammar of `response_format`.

A grammar's state depends only on the schema and the output tokens, so that a later attempt can
rebuild it from the history. The mask is applied last, and overrides other restrictions.
"""

import json
import threading
from functools import cached_property
from typing import Any

import msgspec
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from torch import Tensor

from kvrs.errors import RequestError
from kvrs.protocol.openai.decoding import decode_as
from kvrs.protocol.openai.translated import not_supported

_PARAM = "response_format"
_ANY_OBJECT = {"type": "object"}
_SHOWN_CHARACTERS = 300  # Limit of an error message about a schema or its output.
# Limit of a schema's depth: llguidance follows references by recursion, and twice as many levels
# overflow a stack of 8 MB and end the process.
_MAX_LEVELS = 2000


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any] = {}
    name: str = ""
    description: str | None = None
    strict: bool | None = None  # Ignored: the output always follows the schema.


class _Format(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None


_FORMAT = msgspec.json.Decoder(_Format | None)


class Grammar:
    """The grammar of one stream."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def failure(self) -> str:
        """The reason why the grammar has failed; empty: it has not."""
        return self._matcher.get_error()[:_SHOWN_CHARACTERS]

    def apply(self, row: Tensor, logits: Tensor) -> Tensor:
        """Return the logits `[vocab]` with forbidden tokens masked. If other restrictions have
        masked all allowed tokens, the model's own logits `row` are used.
        """
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        forbidden = allowed[: len(row)] == 0
        masked = row.masked_fill(forbidden, -torch.inf)
        if bool(torch.isfinite(masked).any()):
            return masked
        return logits.masked_fill(forbidden, -torch.inf)

    def take(self, token_id: int) -> bool:
        """Advance the grammar by an output token; return whether the token is allowed."""
        return bool(self._matcher.consume_token(token_id))


class Grammars:
    """Creates the grammars of one model's streams."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        # Slow for large vocabularies. Tokenizers may have more tokens than the weights.
        tokens = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        return LLTokenizer(
            self._tokenizer.to_str(),
            n_vocab=max(self._vocab_size, tokens),
            eos_token=self._eos_token_ids,
        )

    def grammar(self, response_format: msgspec.Raw) -> Grammar | None:
        """Return the grammar at the start of the output; None: any text is allowed. Slow, so do not
        call this on the event loop.

        Raises:
            RequestError: the format is malformed, or its schema uses an unsupported feature.
        """
        asked = decode_as(_FORMAT, bytes(response_format), _PARAM)
        if asked is None or asked.type == "text":
            return None
        if asked.type not in ("json_object", "json_schema"):
            raise not_supported(f"{_PARAM}.type", asked.type, "text, json_object, json_schema")
        if not self._eos_token_ids:
            raise RequestError("the model has no token that ends an output", param=_PARAM)
        schema: dict[str, Any] = _ANY_OBJECT
        if asked.type == "json_schema":
            if asked.json_schema is None:
                raise RequestError("json_schema is missing", param=f"{_PARAM}.json_schema")
            schema = asked.json_schema.schema
        _check_schema(schema)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        with self._lock:
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            cause = matcher.get_error()[:_SHOWN_CHARACTERS]
            raise _refused(f"the schema is not supported: {cause}")
        return Grammar(matcher)


def _check_schema(schema: dict[str, Any]) -> None:
    """Raises RequestError if llguidance would take too long, or overflow its stack."""
    references, depth, level = set(), 0, list[Any]([schema])
    while level:
        depth += 1
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
                if isinstance(reference := value.get("$ref"), str):
                    references.add(reference)
                # llguidance builds an automaton with n states for the multiples of n.
                if isinstance(value.get("multipleOf"), int | float):
                    raise _refused("multipleOf is not supported")
            elif isinstance(value, list):
                below += value
        level = below
    # An upper bound of the depth, following each reference once.
    if (levels := depth * (len(references) + 1)) > _MAX_LEVELS:
        raise _refused(
            f"its depth with all $ref followed may be {levels}; allowed: at most {_MAX_LEVELS}"
        )


def _refused(message: str) -> RequestError:
    return RequestError(message, param=f"{_PARAM}.json_schema.schema")
