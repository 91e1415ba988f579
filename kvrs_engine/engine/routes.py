"""The HTTP routes of an instance: OpenAI completions and chat with vLLM's P/D convention, and the
instance protocol.
"""

import time
from collections.abc import Callable
from functools import partial

import msgspec

from kvrs.net import http
from kvrs.net.heartbeats import add_heartbeats
from kvrs.net.routes import JSON, Handler, Request, Response, Routes, Step
from kvrs.protocol.instance import (
    FenceRequest,
    KvTransferParams,
    LeaseAnswer,
    LeaseUpdate,
    RankAnswer,
    RankRequest,
    ReloadNotice,
)
from kvrs.protocol.openai.chunks import DONE, error_body, sse
from kvrs.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from kvrs.protocol.secrets import Scope
from kvrs_engine.engine.admission import Admission
from kvrs_engine.engine.answers import Answer, ChatAnswer, CompletionAnswer
from kvrs_engine.engine.requests import GenerationRun, StepOutput
from kvrs_engine.engine.runs import FencedError
from kvrs_engine.engine.served import ServedInstance


def make_routes(instance: ServedInstance) -> Routes:
    """Return all routes of an instance. All but `/healthz` require the instance's key."""
    handlers = InstanceHandlers(instance)
    routes = http.authenticated(Scope.INSTANCE, _refuse_while_down(instance), _explain_fence)
    routes.add("GET", "/healthz", handlers.health)
    routes.add("GET", "/v1/models", handlers.models)
    routes.add("POST", "/v1/completions", handlers.completions)
    routes.add("POST", "/v1/chat/completions", handlers.chat_completions)
    routes.add("GET", "/kvrs/v1/instance", handlers.instance_info)
    routes.add("GET", "/kvrs/v1/load", handlers.load)
    routes.add("POST", "/kvrs/v1/leases", handlers.leases)
    routes.add("POST", "/kvrs/v1/fence", handlers.fence)
    routes.add("POST", "/kvrs/v1/ranks", handlers.ranks)
    routes.add("POST", "/kvrs/v1/reload", handlers.reload)
    routes.add("GET", "/kvrs/v1/drafts", instance.draft_helper)
    routes.add("POST", "/reset_prefix_cache", handlers.reset_prefix_cache)
    add_heartbeats(routes)
    return routes


async def _explain_fence(request: Request, handler: Handler) -> Response:
    try:
        return await handler(request)
    except FencedError as error:
        return http.error(409, str(error), kind="conflict")


def _refuse_while_down(instance: ServedInstance) -> Step:
    async def step(request: Request, handler: Handler) -> Response:
        if (cause := instance.down()) is not None:
            return http.error(503, cause, kind="server_error")
        return await handler(request)

    return step


class InstanceHandlers:
    """The handlers of all routes, which translate between HTTP and the instance."""

    def __init__(self, instance: ServedInstance) -> None:
        self._instance = instance
        self._admission = Admission(instance)
        self._encoder = msgspec.json.Encoder()

    async def health(self, request: Request) -> Response:
        return Response(200 if self._instance.failed() is None else 503)

    async def models(self, request: Request) -> Response:
        model = {"id": self._instance.model, "object": "model", "created": 0, "owned_by": "kvrs"}
        return http.answer({"object": "list", "data": [model]})

    async def instance_info(self, request: Request) -> Response:
        return http.answer(self._instance.info())

    async def reset_prefix_cache(self, request: Request) -> Response:
        self._instance.pages.reset_cache()
        return http.answer({})

    async def leases(self, request: Request) -> Response:
        update = http.decode(await request.read(), LeaseUpdate)
        pages = self._instance.pages
        pages.unretain(update.release)
        return http.answer(
            LeaseAnswer(unknown=pages.renew(update.renew, time.monotonic() + update.lease_s))
        )

    async def fence(self, request: Request) -> Response:
        """Drop lower attempts and raise the epoch. A fence because of ended slots only ends
        transfers.
        """
        fence = http.decode(await request.read(), FenceRequest)
        if fence.slots_only:
            self._instance.end_transfers(fence.numbers())
        else:
            self._instance.fence(fence.numbers())
        return http.answer(self._instance.info())

    async def reload(self, request: Request) -> Response:
        self._instance.reloading(http.decode(await request.read(), ReloadNotice))
        return Response(204)

    async def ranks(self, request: Request) -> Response:
        order = http.decode(await request.read(), RankRequest)
        return http.answer(RankAnswer(await self._instance.order_rank(order)))

    async def load(self, request: Request) -> Response:
        """Return the load report once, or as a stream that ends with this process."""
        if "watch" not in request.query:
            return http.answer(self._instance.load())
        return await http.watch(request, self._instance.load, self._instance.news)

    async def completions(self, request: Request) -> Response:
        return await self._serve(request, parse_completion_request, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        return await self._serve(request, parse_chat_request, ChatAnswer)

    async def _serve(
        self,
        request: Request,
        parse: Callable[[bytes], CompletionRequest | ChatRequest],
        kind: type[Answer],
    ) -> Response:
        """Serve a run to its end; a client that disconnects ends its run."""
        body = await request.read()
        asked = await self._admission.large.run(len(body), partial(parse, body))
        run = await self._admission.admit(asked)
        names_prompt = self._names_prompt(asked, run)
        model, pieces = self._instance.model, self._instance.pieces
        answer = kind(asked, run, model, int(time.time()), pieces, names_prompt=names_prompt)
        self._instance.core.submit(run)
        try:
            if asked.stream:
                return await self._stream(request, asked, run, answer)
            return await self._whole(run, answer)
        finally:
            self._instance.core.abort(run)

    async def _stream(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        run: GenerationRun,
        answer: Answer,
    ) -> Response:
        writer = http.PieceWriter(request, "text/event-stream")
        opening = answer.opening()
        waiting = b"" if opening is None else self._event(opening)
        while (output := await run.outputs.get()) is not None:
            waiting += self._event(answer.event(output))
            if output.finish_reason is not None:
                if asked.wants_usage:
                    waiting += self._event(answer.usage_event())
                break
            await writer.write(waiting)
            waiting = b""
        else:
            waiting = sse(_failure_body(run))
        await writer.write(waiting + DONE)
        return writer.end()

    async def _whole(self, run: GenerationRun, answer: Answer) -> Response:
        outputs: list[StepOutput] = []
        while (output := await run.outputs.get()) is not None:
            outputs.append(output)
            if output.finish_reason is not None:
                return http.answer(
                    answer.whole(
                        outputs, self._hand_off(run) if run.sequence.prefill_only else None
                    )
                )
        status = 409 if run.failure is None else 500
        return Response(status, _failure_body(run), {"Content-Type": JSON})

    def _names_prompt(self, asked: CompletionRequest | ChatRequest, run: GenerationRun) -> bool:
        """Return whether the first event must have the prompt's token ids, because the caller does
        not know them.
        """
        first = (
            run.sequence.history_tokens == run.sequence.prompt_tokens
            and asked.kv_transfer_params is None
        )
        return self._instance.one_call and first and asked.return_token_ids

    def _event(self, message: msgspec.Struct) -> bytes:
        return sse(self._encoder.encode(message))

    def _hand_off(self, run: GenerationRun) -> KvTransferParams:
        settings = self._instance.settings
        return KvTransferParams(
            do_remote_prefill=True,
            remote_engine_id=settings.id,
            remote_block_ids=[tag.hex() for tag in run.sequence.tags],
            remote_host=settings.host,
            remote_port=settings.page_port,
            remote_request_id=run.sequence.stream,
        )


def _failure_body(run: GenerationRun) -> bytes:
    if run.failure is not None:
        return error_body(run.failure, kind="server_error", code=run.failure_code)
    return error_body("this attempt was superseded", kind="conflict", code="fenced")
