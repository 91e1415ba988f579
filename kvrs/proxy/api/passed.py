"""Endpoints without streams: any instance gives the same answer in one piece, so a request whose
instance dies is repeated at another one. vLLM answers all of them; for other engines the proxy's
own tokenizer answers those about tokens.
"""

from collections.abc import Callable
from functools import partial

import msgspec
from tokenizers import Tokenizer

from kvrs.errors import ConfigError, RequestError, UnknownFieldError
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.openai.decoding import check_structure, decode_as
from kvrs.protocol.openai.fields import FIELDS, VLLM, Treatment, not_supported
from kvrs.protocol.openai.requests import HIGHEST_ID, Fields, encode_with_ids
from kvrs.proxy.api.client_port import ClientPort, find_model, json_response

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
# All paths that are passed on: with others of vLLM a client could stop an instance, or load
# adapters.
PATHS = (
    *(TOKENIZE, DETOKENIZE, "/v1/embeddings", "/pooling"),
    *("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
# Fields that clients may not set, as in streams: they name hosts, ranks or requests, or raise a
# request's priority.
_KEPT_FROM_ENGINES = frozenset(
    row.name
    for row in FIELDS
    if row.api is None and row.vllm in (Treatment.REFUSED, Treatment.INTERNAL)
)
_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class TokenizeRequest(msgspec.Struct):
    """Body of `POST /tokenize` for the proxy's own tokenizer."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
_MODEL = msgspec.json.Decoder(str | None)


class Passed:
    """Serves the endpoints without streams."""

    def __init__(self, port: ClientPort) -> None:
        self._port = port

    def add_to(self, routes: Routes) -> None:
        for path in PATHS:
            routes.add("POST", path, partial(self.serve, path))

    async def serve(
        self, path: str, request: Request, translate: Callable[..., bytes] | None = None
    ) -> Response:
        """Answer a request for `path`. `translate`: makes the body for `path` from the request's;
        None: they are the same.
        """
        call = self._port.begin(request)
        with call.held:
            await self._port.read_body(call)
            call.held.open(1)
            body = call.body
            if translate is not None:
                body = await self._port.parse(translate, body)
            return await self._answer(path, body)

    async def _answer(self, path: str, body: bytes) -> Response:
        """Answer a request for `path` with this body.

        Raises:
            RequestError: a wrong body, or an endpoint that no engine here has.
        """
        fields = await self._port.large.run(len(body), partial(_fields, body))
        model = decode_as(_MODEL, bytes(fields.get("model", b"null")), "model")
        found = find_model(self._port.control.instances, model)
        if self._port.driver.engine == VLLM:
            return await self._port.ask(path, fields, found.key)
        if path == TOKENIZE:
            return await self._tokenize(fields)
        if path == DETOKENIZE:
            return await self._detokenize(fields)
        raise RequestError(
            f"{path} is not served by the engine {str(self._port.driver.engine)!r}; "
            "allowed: an engine of vLLM",
            status=404,
        )

    async def _tokenize(self, fields: Fields) -> Response:
        _check_known(fields, TokenizeRequest)
        asked = decode_as(_TOKENIZE, encode_with_ids(fields))
        tokenizer = await self._tokenizer()
        special = asked.add_special_tokens
        found = await self._port.large.run(
            len(asked.prompt),
            lambda: tokenizer.encode(asked.prompt, add_special_tokens=special),
        )
        strings = found.tokens if asked.return_token_strs else None
        most = self._port.control.instances.max_model_len
        return json_response(
            encode_with_ids(TokenizeAnswer(len(found.ids), most, found.ids, strings))
        )

    async def _detokenize(self, fields: Fields) -> Response:
        _check_known(fields, DetokenizeRequest)
        tokens = decode_as(_DETOKENIZE, encode_with_ids(fields)).tokens
        tokenizer = await self._tokenizer()
        known = min(HIGHEST_ID, tokenizer.get_vocab_size(with_added_tokens=True) - 1)
        if (wrong := next((one for one in tokens if not 0 <= one <= known), None)) is not None:
            raise RequestError(f"token ids must be in [0, {known}], got {wrong}", param="tokens")
        text = await self._port.large.run(
            len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False)
        )
        return json_response(msgspec.json.encode(DetokenizeAnswer(text)))

    async def _tokenizer(self) -> Tokenizer:
        try:
            return await self._port.driver.tokenizer.load()
        except ConfigError as error:
            raise RequestError(f"there is no tokenizer: {error}", status=404) from None


def _fields(body: bytes) -> Fields:
    """Return the fields of a body without nulls; the engine checks the values."""
    if body.lstrip().startswith(b"{"):
        check_structure(body)
    given = decode_as(_FIELDS, body)
    fields = {name: value for name, value in given.items() if bytes(value) != b"null"}
    for name in _KEPT_FROM_ENGINES.intersection(fields):
        raise not_supported(name, fields[name], ())
    return fields


def _check_known(fields: Fields, kind: type[msgspec.Struct]) -> None:
    """Check the names of the fields. Raises RequestError: the proxy's tokenizer does not know a
    field.
    """
    known = kind.__struct_fields__
    if unknown := [name for name in fields if name not in known]:
        raise UnknownFieldError(unknown[0], known)
