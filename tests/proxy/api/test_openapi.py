"""The OpenAPI documents against what the ports do."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # Its stubs are a package of their own.
import msgspec
import pytest

from kvrs.errors import UnknownFieldError
from kvrs.protocol.anthropic import chat_of
from kvrs.protocol.openai.requests import LOGPROBS_RANGE, RANGES, ChatRequest, CompletionRequest
from kvrs.protocol.openai.responses import parse_response_request
from kvrs.proxy.server import Proxy
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.api.openapi_files import ADMIN, CLIENTS, load
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

# Between processes of the cluster; dropped where a client sends them.
INTERNAL = {"kvrs", "kv_transfer_params"}
# Schemas of the requests and answers of paths.
REQUESTS = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatRequest",
    "/v1/responses": "ResponseRequest",
    "/v1/messages": "MessageRequest",
    "/v1/messages/count_tokens": "MessageRequest",
}
ANSWERS = {
    "/v1/completions": "Answer",
    "/v1/chat/completions": "Answer",
    "/v1/responses": "Response",
    "/v1/messages": "Message",
    "/v1/messages/count_tokens": "TokenCount",
}


def value(draw: Random, depth: int = 0) -> Any:
    """Any JSON."""
    kind = draw.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(draw.randrange(3))]
    if kind == 8:
        return {str(number): value(draw, depth + 1) for number in range(draw.randrange(3))}
    plain = (None, True, 0, -1, 2**70, 0.5, "\ud83d\ude00", "a", 1e308)
    return draw.choice(plain)


def served_paths(proxy: Proxy, is_admin: bool) -> set[tuple[str, str]]:
    """Method and path of every route of a port."""
    (port,) = [
        port for port in proxy._ports if port.port == (proxy.admin_port if is_admin else proxy.port)
    ]
    return {(method.lower(), path) for method, path in port.routes.served if method != "HEAD"}


def documented(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (method, path)
        for path, item in document["paths"].items()
        for method in item
        if method in ("get", "post", "delete")
    }


async def test_every_route_is_documented_and_no_other(build: ProxyClusterBuilder) -> None:
    """A route that is added to the code must be added to the document, and the other way round."""
    system = await build(pairs=1)
    for is_admin, path in ((False, CLIENTS), (True, ADMIN)):
        assert served_paths(system.proxy, is_admin) == documented(load(path))


def fields_of(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)} - INTERNAL


def fields_known_to(parse: Callable[[bytes], object]) -> set[str]:
    with pytest.raises(UnknownFieldError) as refusal:
        parse(b'{"mystery":1}')
    return set(str(refusal.value).partition("allowed: ")[2].partition("; ")[0].split(", "))


def test_fields_of_requests_and_their_ranges_are_documented() -> None:
    """A field, or a range, that is changed in the code must be changed in the document."""
    schemas = load(CLIENTS)["components"]["schemas"]
    documented = {name: each["properties"] for name, each in schemas.items() if "Request" in name}

    assert {name: set(fields) for name, fields in documented.items()} == {
        "CompletionRequest": fields_of(CompletionRequest),
        "ChatRequest": fields_of(ChatRequest),
        "ResponseRequest": fields_known_to(parse_response_request),
        "MessageRequest": fields_known_to(chat_of),
    }
    for fields in (documented["CompletionRequest"], documented["ChatRequest"]):
        for name, schema in fields.items():
            limits = LOGPROBS_RANGE if "logprobs" in name else RANGES.get(name)
            if limits is not None:
                assert (schema["minimum"], schema["maximum"]) == limits, name


async def test_every_answer_is_as_documented(build: ProxyClusterBuilder) -> None:
    """Whatever is sent, the answer has a documented form, and no request is an internal error."""
    system = await build(pairs=1)
    schemas = load(CLIENTS)["components"]["schemas"]
    draw = Random(0)
    bodies: list[tuple[str, dict[str, Any]]] = []
    for path in REQUESTS:
        names = sorted(schemas[REQUESTS[path]]["properties"])

        for _ in range(60):
            fields = {
                name: value(draw)
                for name in draw.sample(names, min(len(names), draw.randint(0, 4)))
            }
            chosen: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 2} | fields
            if "chat" in path or "messages" in path:
                del chosen["prompt"]
                chosen = {"messages": [{"role": "user", "content": "a"}]} | chosen
            if path == "/v1/responses":
                chosen = {"input": "a", "max_output_tokens": 2} | fields
            bodies.append((path, chosen))
    for path, fields in bodies:
        status, found = await _send(system, path, fields)

        assert status < 500, (path, fields, found)
        if status != 200:
            form = "MessageError" if "messages" in path else "Error"
            jsonschema.validate(json.loads(found), schemas[form])
        elif not found.startswith((b"data: ", b"event: ")):
            jsonschema.validate(json.loads(found), schemas[ANSWERS[path]])


async def _send(system: ProxyCluster, path: str, fields: dict[str, Any]) -> tuple[int, bytes]:
    async with system.http.post(
        system.url + path,
        data=json.dumps(fields).encode("utf-8", "replace"),
        headers={"Content-Type": "application/json"},
    ) as response:
        return response.status, await response.read()
