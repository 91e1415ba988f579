"""The OpenAPI documents against what the ports do."""

import json
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # Its stubs are a package of their own.
import pytest

from kvrs.proxy.api.openapi import admin_document, clients_document
from kvrs.proxy.server import Proxy
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network


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
    """Method and path of every route of a port; `/` only leads to the page."""
    (app,) = [
        port._runner.app
        for port in proxy._ports
        if port.port == (proxy.admin_port if is_admin else proxy.port)
    ]
    return {
        (route.method.lower(), str(route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD" and route.resource.canonical != "/"
    }


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
    for is_admin, wanted in ((False, clients_document()), (True, admin_document())):
        port = system.proxy.admin_port if is_admin else system.proxy.port
        async with system.http.get(f"http://127.0.0.1:{port}/openapi.json") as answer:
            document = json.loads(await answer.text())

        assert document == wanted
        assert served_paths(system.proxy, is_admin) == documented(document)


async def test_every_answer_is_as_documented(build: ProxyClusterBuilder) -> None:
    """Whatever is sent, the answer has a documented form, and no request is an internal error."""
    system = await build(pairs=1)
    document = clients_document()
    draw = Random(0)
    bodies: list[tuple[str, dict[str, Any]]] = []
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        names = sorted(body["schema"]["properties"])

        for _ in range(60):
            fields = {
                name: value(draw)
                for name in draw.sample(names, min(len(names), draw.randint(0, 4)))
            }
            good = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
            chosen = {"prompt": [1, 2]} | good | {"max_tokens": 2} | fields
            if path == "/v1/responses":
                chosen = {"input": "a", "max_output_tokens": 2} | fields
            bodies.append((path, chosen))
    for path, fields in bodies:
        status, found = await _send(system, path, fields)

        operation = document["paths"][path]["post"]["responses"]
        assert status < 500, (path, fields, found)
        if status != 200:
            schema = document["components"]["schemas"]["Error"]
            jsonschema.validate(json.loads(found), schema)
        elif not found.startswith((b"data: ", b"event: ")):
            jsonschema.validate(
                json.loads(found), operation["200"]["content"]["application/json"]["schema"]
            )


async def _send(system: ProxyCluster, path: str, fields: dict[str, Any]) -> tuple[int, bytes]:
    async with system.http.post(
        system.url + path,
        data=json.dumps(fields).encode("utf-8", "replace"),
        headers={"Content-Type": "application/json"},
    ) as response:
        return response.status, await response.read()
