"""The OpenAPI documents of the clients' port and of the admin port, at `/openapi.json` of each. The
fields of requests are those of the structs that parse them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvrs import __version__
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest

PATH = "/openapi.json"

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "faults": {"type": "array", "items": {"type": "string"}},
            },
        }
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "object"],
    "properties": {"id": {"type": "string"}, "object": {"const": "model"}},
}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices"],
    "properties": {
        "id": {"type": "string"},
        "object": {"enum": ["text_completion", "chat.completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": "object"},
    },
}
_RELOAD = {
    "type": "object",
    "required": ["applied", "restart_needed"],
    "properties": {
        name: {"type": "array", "items": {"type": "string"}}
        for name in ("applied", "restart_needed")
    },
}


def clients_document() -> dict[str, Any]:
    """The API for clients."""
    return _document(
        "kvrs",
        {
            "/v1/completions": {"post": _completion(_request(CompletionRequest))},
            "/v1/chat/completions": {"post": _completion(_request(ChatRequest))},
            "/generate": {"post": _operation("DistServe's endpoint", {}, _request(None))},
            "/v1/models": {
                "get": _operation(
                    "Served models",
                    {
                        "type": "object",
                        "required": ["object", "data"],
                        "properties": {
                            "object": {"const": "list"},
                            "data": {"type": "array", "items": _MODEL},
                        },
                    },
                )
            },
            "/v1/models/{model}": {
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string"},
                    }
                ],
                "get": _operation("One model", _MODEL),
            },
            "/healthz": {"get": _operation("Whether the process runs", None)},
            "/readyz": {"get": _operation("Whether a stream could start now", None)},
        },
    )


def admin_document() -> dict[str, Any]:
    """The API for operators."""
    return _document(
        "kvrs, admin port",
        {
            "/kvrs/v1/state": {"get": _operation("Instances, streams, recoveries", {})},
            "/kvrs/v1/reload": {"post": _operation("Read the file again", _RELOAD)},
            "/metrics": {"get": _operation("Metrics for Prometheus", None)},
            "/healthz": {"get": _operation("Whether the process runs", None)},
        },
    )


def add_document(app: web.Application, document: Mapping[str, Any]) -> None:
    """Serve a document at `/openapi.json`."""
    body = msgspec.json.encode(document)

    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app.router.add_get(PATH, serve)


def _document(title: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    own = {PATH: {"get": _operation("This document", {})}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": {**paths, **own},
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _operation(
    summary: str, answer: Mapping[str, Any] | None, request: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`answer`: the schema of JSON; None: text."""
    found = (
        {"text/plain": {"schema": {"type": "string"}}}
        if answer is None
        else {"application/json": {"schema": dict(answer)}}
    )
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done", "content": found},
            "default": {"description": "An error in OpenAI's form", "content": error},
        },
    }
    if request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": dict(request)}},
        }
    return operation


def _completion(request: Mapping[str, Any]) -> dict[str, Any]:
    operation = _operation("A completion, whole or as a stream of events", _ANSWER, request)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return operation


def _request(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    """The body as a struct reads it; further fields may be taken, by backend (docs/openai.md)."""
    if kind is None:
        return {"type": "object", "required": ["prompt"], "properties": {"prompt": {}}}
    fields = msgspec.structs.fields(kind)
    return {
        "type": "object",
        "required": [field.encode_name for field in fields if field.required],
        "properties": {field.encode_name: _schema(field.type) for field in fields},
    }


def _schema(kind: Any) -> dict[str, Any]:
    try:
        return msgspec.json.schema(kind, ref_template="#/components/schemas/{name}")
    except TypeError:
        return {}  # Raw JSON, which only the engine's template reads.
