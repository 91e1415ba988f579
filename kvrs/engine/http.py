"""The HTTP face of an instance: the OpenAI completions API with vLLM's P/D convention, and the instance protocol."""

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvrs.engine.core import FencedError
from kvrs.engine.instance import EngineInstance
from kvrs.engine.requests import Run, Source, StepOutput, make_run
from kvrs.errors import RequestError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import FenceRequest, KvrsParams, KvTransferParams, LeaseAnswer, LeaseUpdate
from kvrs.protocol.openai import (
    DONE,
    Choice,
    Completion,
    CompletionRequest,
    Usage,
    error_body,
    parse_completion_request,
    sse,
)
from kvrs.protocol.secrets import http_token
from kvrs.scheduling.sequences import Sequence

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
SHORTEST_WATCH_S = 0.02


def make_app(instance: EngineInstance) -> web.Application:
    """All routes of an instance. Everything but `/healthz` wants the cluster's bearer token."""
    face = _Face(instance)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_authenticate(http_token(instance.secret)), _explain])
    app.add_routes(
        [
            web.get("/healthz", face.health),
            web.get("/v1/models", face.models),
            web.post("/v1/completions", face.completions),
            web.get("/kvrs/v1/instance", face.instance_info),
            web.get("/kvrs/v1/load", face.load),
            web.post("/kvrs/v1/leases", face.leases),
            web.post("/kvrs/v1/fence", face.fence),
            web.post("/reset_prefix_cache", face.reset_prefix_cache),
        ]
    )
    return app


def _authenticate(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != "/healthz" and not hmac.compare_digest(given, expected):
            return _error(401, "this endpoint wants the cluster's bearer token", kind="authentication_error")
        return await handler(request)

    return middleware


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of the caller's making become OpenAI-style bodies."""
    try:
        return await handler(request)
    except RequestError as error:
        return _error(error.status, str(error), param=error.param)
    except FencedError as error:
        return _error(409, str(error), kind="conflict")


def _error(status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None) -> web.Response:
    body = error_body(message, kind=kind, param=param)
    return web.Response(status=status, body=body, content_type="application/json")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _decode(body: bytes, what: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=what)
    except msgspec.DecodeError as error:
        raise RequestError(str(error)) from None


class _Face:
    """Handlers; each translates and does nothing else."""

    def __init__(self, instance: EngineInstance) -> None:
        self._instance = instance
        self._encoder = msgspec.json.Encoder()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._instance.failed() is None else 503)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self._instance.model, "object": "model", "created": 0, "owned_by": "kvrs"}
        return _json({"object": "list", "data": [model]})

    async def instance_info(self, request: web.Request) -> web.Response:
        return _json(self._instance.info())

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        self._instance.pages.reset_cache()
        return _json({})

    async def leases(self, request: web.Request) -> web.Response:
        update = _decode(await request.read(), LeaseUpdate)
        pages = self._instance.pages
        pages.unretain(update.release)
        return _json(LeaseAnswer(unknown=pages.renew(update.renew, time.monotonic() + update.lease_s)))

    async def fence(self, request: web.Request) -> web.Response:
        """Drop lower attempts; the raised epoch tells everybody that what they knew of this instance is void."""
        fence = _decode(await request.read(), FenceRequest)
        self._instance.core.fence({stream: (0, attempt) for stream, attempt in fence.attempts.items()})
        self._instance.epoch += 1
        return _json(self._instance.info())

    async def load(self, request: web.Request) -> web.StreamResponse:
        """Once, or as an endless stream whose end tells the watcher that this process is gone."""
        if "watch" not in request.query:
            return _json(self._instance.load())
        try:
            interval_s = max(SHORTEST_WATCH_S, float(request.query["watch"]))
        except ValueError:
            raise RequestError(f"watch must be seconds, got {request.query['watch']!r}", param="watch") from None
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        while True:
            await response.write(msgspec.json.encode(self._instance.load()) + b"\n")
            await asyncio.sleep(interval_s)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = parse_completion_request(await request.read())
        run, params = self._make_run(asked)
        async with self._submitted(run):
            if asked.stream:
                return await self._stream(request, asked, run, params)
            return await self._whole(asked, run, params)

    @asynccontextmanager
    async def _submitted(self, run: Run) -> AsyncIterator[None]:
        """A client that leaves ends its run."""
        self._instance.core.submit(run)
        try:
            yield
        finally:
            self._instance.core.abort(run)

    def _make_run(self, asked: CompletionRequest) -> tuple[Run, KvrsParams]:
        instance = self._instance
        ids = instance.tokenizer.encode(asked.prompt).ids if isinstance(asked.prompt, str) else asked.prompt
        if not ids:
            raise RequestError("prompt must not be empty", param="prompt")
        if max(ids) >= instance.worker.vocab_size:
            raise RequestError(f"token ids must be below {instance.worker.vocab_size}, got {max(ids)}", param="prompt")
        params = asked.kvrs or KvrsParams(stream=StreamId(secrets.token_hex(16)), attempt=1, prompt_tokens=len(ids))
        # A text prompt is the client's whole prompt: its length is not known before it is tokenised here.
        params.prompt_tokens = len(ids) if isinstance(asked.prompt, str) else min(params.prompt_tokens or len(ids), len(ids))
        transfer = asked.kv_transfer_params or KvTransferParams()
        self._check_length(params.prompt_tokens, asked.max_tokens)
        source, pages = self._source(transfer, params, len(ids))
        sequence = Sequence(
            stream=params.stream,
            attempt=(params.owner_epoch, params.attempt),
            token_ids=list(ids),
            prompt_tokens=params.prompt_tokens,
            root=instance.root(asked.cache_salt),
            prefill_only=transfer.do_remote_decode,
            pull_pages=pages,
            pull_tail=source is not None and source.handoff is not None,
        )
        return make_run(asked, sequence, source, instance.tokenizer, instance.worker.eos_token_ids), params

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        longest = self._instance.max_model_len
        if prompt_tokens + max_tokens > longest:
            raise RequestError(
                f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) together must be at most {longest} tokens",
                param="prompt" if prompt_tokens >= longest else "max_tokens",
            )
        if not self._instance.core.scheduler.fits(prompt_tokens, max_tokens):
            raise RequestError("the request needs more KV pages than this instance has", param="max_tokens")

    def _source(self, transfer: KvTransferParams, params: KvrsParams, history_tokens: int) -> tuple[Source | None, int]:
        """Who holds the leading pages, and how many. Hosts and ports of a request are ignored: the registry knows."""
        if transfer.do_remote_prefill and transfer.remote_engine_id is not None:
            known = self._known(InstanceId(transfer.remote_engine_id))
            blocks = transfer.remote_block_ids or []
            return Source(known, None, transfer.remote_request_id), len(blocks)
        if params.sources:
            run = params.sources[0]
            return Source(self._known(run.id), run.generation, None), run.pages if run.first_page == 0 else 0
        return None, 0

    def _known(self, instance: InstanceId) -> InstanceId:
        if instance not in self._instance.registry:
            allowed = ", ".join(self._instance.registry)
            raise RequestError(f"instance {instance!r} is not in the registry; allowed: {allowed}", param="kv_transfer_params")
        return instance

    async def _stream(self, request: web.Request, asked: CompletionRequest, run: Run, params: KvrsParams) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        completion = self._completion(params)
        while (output := await run.outputs.get()) is not None:
            completion.choices = [_choice(output, asked)]
            await response.write(sse(self._encoder.encode(completion)))
            if output.finish_reason is not None:
                if asked.stream_options is not None and asked.stream_options.include_usage:
                    completion.choices, completion.usage = [], _usage(run)
                    await response.write(sse(self._encoder.encode(completion)))
                break
        else:
            await response.write(sse(error_body("this attempt was superseded", kind="conflict", code="fenced")))
        await response.write(DONE)
        await response.write_eof()
        return response

    async def _whole(self, asked: CompletionRequest, run: Run, params: KvrsParams) -> web.Response:
        outputs: list[StepOutput] = []
        while (output := await run.outputs.get()) is not None:
            outputs.append(output)
            if output.finish_reason is not None:
                break
        else:
            return _error(409, "this attempt was superseded", kind="conflict")
        merged = StepOutput(
            [token_id for output in outputs for token_id in output.token_ids],
            "".join(output.text for output in outputs),
            outputs[-1].finish_reason,
            outputs[-1].stop_reason,
        )
        completion = self._completion(params)
        choice = _choice(merged, asked)
        if asked.return_token_ids:
            choice.prompt_token_ids = run.sequence.token_ids[: params.prompt_tokens]
        completion.choices, completion.usage = [choice], _usage(run)
        if run.sequence.prefill_only:
            completion.kv_transfer_params = self._hand_off(run)
        return _json(completion)

    def _completion(self, params: KvrsParams) -> Completion:
        return Completion(id=f"cmpl-{params.stream}", created=int(time.time()), model=self._instance.model, choices=[])

    def _hand_off(self, run: Run) -> KvTransferParams:
        settings = self._instance.settings
        return KvTransferParams(
            do_remote_prefill=True,
            remote_engine_id=settings.id,
            remote_block_ids=[tag.hex() for tag in run.sequence.tags],
            remote_host=settings.host,
            remote_port=settings.page_port,
            remote_request_id=run.sequence.stream,
        )


def _choice(output: StepOutput, asked: CompletionRequest) -> Choice:
    choice = Choice(text=output.text, finish_reason=output.finish_reason, stop_reason=output.stop_reason)
    if asked.return_token_ids:
        choice.token_ids = output.token_ids
    return choice


def _usage(run: Run) -> Usage:
    prompt, produced = run.sequence.prompt_tokens, run.produced_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=produced, total_tokens=prompt + produced)
