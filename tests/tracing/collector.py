"""A collector of traces on loopback."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Takes what comes; the first requests get `statuses`."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = deque(statuses)
        self.taken: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.headers.append(dict(request.headers))
        if self.statuses:
            return web.Response(status=self.statuses.popleft(), headers={"Retry-After": "0"})
        self.taken.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(content_type="application/x-protobuf")

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.taken
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, beginning: str) -> list[Span]:
        return [span for span in self.spans if span.name.startswith(beginning)]

    def resource(self) -> dict[str, str]:
        (found,) = {
            tuple((pair.key, pair.value.string_value) for pair in each.resource.attributes)
            for request in self.taken
            for each in request.resource_spans
        }
        return dict(found)


def facts_of(span: Span) -> dict[str, object]:
    return {pair.key: _plain(pair.value) for pair in span.attributes}


def _plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, str(kind))


@asynccontextmanager
async def collecting(*statuses: int) -> AsyncIterator[Collector]:
    collector = Collector(*statuses)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", collector.take)
    # What the SDK's variable of that name holds for traces alone is the whole address.
    app.router.add_post("/own/path", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    collector.url = f"http://{host}:{port}"
    try:
        yield collector
    finally:
        await runner.cleanup()
