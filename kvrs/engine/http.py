"""The HTTP face of an instance: OpenAI completions and chat with vLLM's P/D convention, and the instance protocol."""

import time

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvrs.engine.admission import Admission
from kvrs.engine.answers import Answer, ChatAnswer, CompletionAnswer
from kvrs.engine.fencing import FencedError
from kvrs.engine.requests import Run, StepOutput
from kvrs.engine.served import ServedInstance
from kvrs.protocol.instance import FenceRequest, KvTransferParams, LeaseAnswer, LeaseUpdate
from kvrs.protocol.openai import (
    DONE,
    ChatRequest,
    CompletionRequest,
    error_body,
    parse_chat_request,
    parse_completion_request,
    sse,
)
from kvrs.transfer import http


def make_app(instance: ServedInstance) -> web.Application:
    """All routes of an instance. Everything but `/healthz` wants the cluster's bearer token."""
    face = _Face(instance)
    app = http.new_app(instance.secret, _refuse_while_down(instance), _explain_fence, older=instance.older)
    app.add_routes(
        [
            web.get("/healthz", face.health),
            web.get("/v1/models", face.models),
            web.post("/v1/completions", face.completions),
            web.post("/v1/chat/completions", face.chat_completions),
            web.get("/kvrs/v1/instance", face.instance_info),
            web.get("/kvrs/v1/load", face.load),
            web.post("/kvrs/v1/leases", face.leases),
            web.post("/kvrs/v1/fence", face.fence),
            web.post("/reset_prefix_cache", face.reset_prefix_cache),
        ]
    )
    return app


@web.middleware
async def _explain_fence(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except FencedError as error:
        return http.error(409, str(error), kind="conflict")


def _refuse_while_down(instance: ServedInstance) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (cause := instance.down()) is not None:
            return http.error(503, cause, kind="server_error")
        return await handler(request)

    return middleware


class _Face:
    """Handlers; each translates and does nothing else."""

    def __init__(self, instance: ServedInstance) -> None:
        self._instance = instance
        self._admission = Admission(instance)
        self._encoder = msgspec.json.Encoder()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._instance.failed() is None else 503)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self._instance.model, "object": "model", "created": 0, "owned_by": "kvrs"}
        return http.answer({"object": "list", "data": [model]})

    async def instance_info(self, request: web.Request) -> web.Response:
        return http.answer(self._instance.info())

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        self._instance.pages.reset_cache()
        return http.answer({})

    async def leases(self, request: web.Request) -> web.Response:
        update = http.decode(await request.read(), LeaseUpdate)
        pages = self._instance.pages
        pages.unretain(update.release)
        return http.answer(LeaseAnswer(unknown=pages.renew(update.renew, time.monotonic() + update.lease_s)))

    async def fence(self, request: web.Request) -> web.Response:
        """Drop lower attempts; the raised epoch tells everybody that what they knew of this instance is void. Where only slots
        have ended, only transfers end.
        """
        fence = http.decode(await request.read(), FenceRequest)
        if fence.slots_only:
            self._instance.end_transfers(fence.numbers())
        else:
            self._instance.fence(fence.numbers())
        return http.answer(self._instance.info())

    async def load(self, request: web.Request) -> web.StreamResponse:
        """Once, or as an endless stream whose end tells the watcher that this process is gone."""
        if "watch" not in request.query:
            return http.answer(self._instance.load())
        return await http.watch(request, self._instance.load)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = parse_completion_request(await request.read())
        run = await self._admission.admit(asked)
        names_prompt = self._names_prompt(asked, run)
        model, pieces = self._instance.model, self._instance.pieces
        answer = CompletionAnswer(asked, run, model, int(time.time()), pieces, names_prompt=names_prompt)
        return await self._serve(request, asked, run, answer)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        asked = parse_chat_request(await request.read())
        run = await self._admission.admit(asked)
        names_prompt = self._names_prompt(asked, run)
        model, pieces = self._instance.model, self._instance.pieces
        answer = ChatAnswer(asked, run, model, int(time.time()), pieces, names_prompt=names_prompt)
        return await self._serve(request, asked, run, answer)

    async def _serve(
        self, request: web.Request, asked: CompletionRequest | ChatRequest, run: Run, answer: Answer
    ) -> web.StreamResponse:
        """Run to the end; a client that leaves ends its run."""
        self._instance.core.submit(run)
        try:
            if asked.stream:
                wants_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
                return await self._stream(request, run, answer, wants_usage)
            return await self._whole(run, answer)
        finally:
            self._instance.core.abort(run)

    async def _stream(self, request: web.Request, run: Run, answer: Answer, wants_usage: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        opening = answer.opening()
        waiting = b"" if opening is None else self._event(opening)
        while (output := await run.outputs.get()) is not None:
            waiting += self._event(answer.event(output))
            if output.finish_reason is not None:
                if wants_usage:
                    waiting += self._event(answer.usage_event())
                break
            await response.write(waiting)
            waiting = b""
        else:
            waiting = sse(_why_it_ended(run))
        await response.write(waiting + DONE)
        await response.write_eof()
        return response

    async def _whole(self, run: Run, answer: Answer) -> web.Response:
        outputs: list[StepOutput] = []
        while (output := await run.outputs.get()) is not None:
            outputs.append(output)
            if output.finish_reason is not None:
                return http.answer(answer.whole(outputs, self._hand_off(run) if run.sequence.prefill_only else None))
        return web.Response(status=409 if run.failure is None else 500, body=_why_it_ended(run), content_type="application/json")

    def _names_prompt(self, asked: CompletionRequest | ChatRequest, run: Run) -> bool:
        """Whether nobody has told the caller the prompt's ids by now."""
        first = run.sequence.history_tokens == run.sequence.prompt_tokens and asked.kv_transfer_params is None
        return self._instance.one_call and first and asked.return_token_ids

    def _event(self, message: msgspec.Struct) -> bytes:
        return sse(self._encoder.encode(message))

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


def _why_it_ended(run: Run) -> bytes:
    if run.failure is not None:
        return error_body(run.failure, kind="server_error", code="engine_failed")
    return error_body("this attempt was superseded", kind="conflict", code="fenced")
