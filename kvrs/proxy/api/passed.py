"""Endpoints without streams: any instance gives the same answer in one piece, so a request whose
instance dies is repeated at another one. vLLM answers all of them; for other engines the proxy's
own tokenizer answers those about tokens.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
from tokenizers import Tokenizer

from kvrs.core.control import Control
from kvrs.core.fleet.names import is_served_at
from kvrs.errors import ConfigError, RequestError, UnknownFieldError, UpstreamError
from kvrs.ids import InstanceId
from kvrs.net.routes import Request, Response, Routes
from kvrs.process.large_work import LargeWork
from kvrs.protocol.openai.chunks import error_body
from kvrs.protocol.openai.decoding import decode_as
from kvrs.protocol.openai.fields import FIELDS, VLLM, Treatment, not_supported
from kvrs.protocol.openai.requests import HIGHEST_ID, Fields
from kvrs.protocol.openai.structure import check_structure
from kvrs.protocol.token_ids import encode
from kvrs.proxy.api.admission import Admissions, find_model
from kvrs.proxy.api.answers import json_response, refusal
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.backends.bodies import Call, context_headers
from kvrs.proxy.streams.driver import Driver, out_of_time
from kvrs.proxy.streams.open_stream import Failed, OpenStream
from kvrs.proxy.wire.errors import BusyError, EngineError
from kvrs.proxy.wire.requests import CURRENT
from kvrs.proxy.wire.watchdog import Watchdog

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

    def __init__(
        self, admissions: Admissions, backend: str, driver: Driver, large: LargeWork
    ) -> None:
        self._admissions = admissions
        self._backend = backend
        self._driver = driver
        self._large = large
        self._control: Control[OpenStream] = driver.control

    def add_to(self, routes: Routes) -> None:
        for path in PATHS:
            routes.add("POST", path, partial(self.serve, path))

    async def serve(
        self, path: str, request: Request, translate: Callable[..., bytes] | None = None
    ) -> Response:
        """Answer a request for `path`. `translate`: makes the body for `path` from the request's;
        None: they are the same.
        """
        call = self._admissions.begin(request)
        with call.held:
            await self._admissions.read_body(call)
            call.held.open(1)
            body = call.body
            if translate is not None:
                body = await self._admissions.parse(translate, body)
            return await self._answer(path, body)

    async def _answer(self, path: str, body: bytes) -> Response:
        """Answer a request for `path` with this body.

        Raises:
            RequestError: a wrong body, or an endpoint that no engine here has.
        """
        fields = await self._large.run(len(body), partial(_fields, body))
        model = decode_as(_MODEL, bytes(fields.get("model", b"null")), "model")
        found = find_model(self._control.instances, model)
        if self._backend == VLLM:
            return await self.ask(path, fields, found.key)
        if path == TOKENIZE:
            return await self._tokenize(fields)
        if path == DETOKENIZE:
            return await self._detokenize(fields)
        raise RequestError(
            f"{path} is not served by the engine {str(self._backend)!r}; "
            "allowed: an engine of vLLM",
            status=404,
        )

    async def _tokenize(self, fields: Fields) -> Response:
        _check_known(fields, TokenizeRequest)
        asked = decode_as(_TOKENIZE, encode(fields))
        tokenizer = await self._tokenizer()
        special = asked.add_special_tokens
        found = await self._large.run(
            len(asked.prompt),
            lambda: tokenizer.encode(asked.prompt, add_special_tokens=special),
        )
        strings = found.tokens if asked.return_token_strs else None
        most = self._control.instances.max_model_len
        return json_response(encode(TokenizeAnswer(len(found.ids), most, found.ids, strings)))

    async def _detokenize(self, fields: Fields) -> Response:
        _check_known(fields, DetokenizeRequest)
        tokens = decode_as(_DETOKENIZE, encode(fields)).tokens
        tokenizer = await self._tokenizer()
        known = min(HIGHEST_ID, tokenizer.get_vocab_size(with_added_tokens=True) - 1)
        if (wrong := next((one for one in tokens if not 0 <= one <= known), None)) is not None:
            raise RequestError(f"token ids must be in [0, {known}], got {wrong}", param="tokens")
        text = await self._large.run(
            len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False)
        )
        return json_response(msgspec.json.encode(DetokenizeAnswer(text)))

    async def _tokenizer(self) -> Tokenizer:
        try:
            return await self._driver.tokenizer.load()
        except ConfigError as error:
            raise RequestError(f"there is no tokenizer: {error}", status=404) from None

    async def ask(self, path: str, fields: Fields, key: str) -> Response:
        """Ask the instances that serve the model or adapter of this key, least loaded first, until
        one answers.
        """
        limit_s = self._driver.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask_in_turn(path, fields, key)
        except TimeoutError:
            if limit_s is None:
                raise
            return refusal(out_of_time("answer", limit_s))

    async def _ask_in_turn(self, path: str, fields: Fields, key: str) -> Response:
        instances, failure = self._control.instances, Failed(503, _NO_INSTANCE, 1.0)
        up = [
            name
            for name, known in instances.known.items()
            if instances.is_up(name) and is_served_at(known.info, key)
        ]
        failed_with = set[str]()
        for name in sorted(up, key=instances.queued):
            try:
                return json_response(await self._ask_one(name, path, fields))
            except RefusedError as error:
                return json_response(error.body, error.status)
            except EngineError as error:
                # A second instance that fails alike shows that the request is at fault, so no
                # further instance is asked.
                is_alike = (cause := str(error)) in failed_with
                failure = Failed(error.status, error.body, rejected=is_alike)
                if is_alike:
                    break
                failed_with.add(cause)
            except UpstreamError as error:
                is_busy = isinstance(error, BusyError)
                wait_s = error.retry_after_s if isinstance(error, BusyError) else 1.0
                code = "busy" if is_busy else "retries"
                body = error_body(f"{name}: {error}", kind="server_error", code=code)
                failure = Failed(503 if is_busy else 502, body, wait_s)
        return refusal(failure)

    async def _ask_one(self, name: InstanceId, path: str, fields: Fields) -> bytes:
        context, progress = CURRENT.get(), self._control.progress
        headers = "" if context is None else context_headers(context, context.id)
        call = Call(path, dict(fields), headers, sum(map(len, fields.values())))
        # No prediction limits the time: embeddings of a batch, or beams, may take minutes.
        with Watchdog(lambda heard_s, _: progress.answer_s(name, heard_s)):
            return await self._driver.backends[name].ask(call)


_NO_INSTANCE = error_body("no instance is up", kind="server_error", code="no_instance")


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
