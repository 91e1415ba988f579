"""The OpenAPI documents of the clients' port and of the admin port, at `/openapi.json` of each. The
fields of requests are those of the structs that parse them.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from aiohttp import web

from kvrs import __version__
from kvrs.protocol.instance import ExitReport
from kvrs.protocol.openai.requests import (
    HIGHEST_ID,
    LOGPROBS_RANGE,
    MAX_STREAMS,
    RANGES,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from kvrs.protocol.openai.responses import PATH as RESPONSES
from kvrs.protocol.openai.responses import response_schema
from kvrs.proxy.api.generate import ALLOWED
from kvrs.proxy.api.passed import FIELDS as PASSED
from kvrs.proxy.fleet.orders import RankOrder
from kvrs.proxy.reload import ReloadResult
from kvrs.proxy.wire.requests import INVOCATIONS

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
_VERSION = {
    "type": "object",
    "required": ["version"],
    "properties": {"version": {"type": "string"}},
}
_LOAD = {
    "type": "object",
    "required": ["server_load"],
    "properties": {"server_load": {"type": "integer", "minimum": 0}},
}
_RESPONSE = {
    "type": "object",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "status": {
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        "model": {"type": "string"},
        "output": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": ["object", "null"]},
    },
}
_ID_IN_PATH = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_RANK_IN_PATH = {
    "name": "rank",
    "in": "path",
    "required": True,
    "schema": {"type": "integer", "minimum": 0},
}
_COMPLETION = "A completion, whole or as a stream of events"
_TEXT = {
    "type": "object",
    "required": ["text", "timestamps", "lifetime_events"],
    "properties": {
        "text": {"type": "string"},
        "timestamps": {"type": "array", "items": {"type": "number"}},
        "lifetime_events": {"type": "array"},
    },
}
_INSTANCE = {
    "type": "object",
    "required": ["node", "id", "role", "port"],
    "properties": {
        "node": {"type": "string"},
        "agent": {"type": ["object", "null"]},
        "id": {"type": "string"},
        "role": {"enum": ["prefill", "decode", "both"]},
        "host": {"type": "string"},
        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
}
_DRAIN = {
    "type": "object",
    "required": ["instance", "drain_s"],
    "properties": {"instance": {"type": "string"}, "drain_s": {"type": ["number", "null"]}},
}
_EXITED = {
    "type": "object",
    "required": ["instance", "start"],
    "properties": {"instance": {"type": "string"}, "start": {"type": "integer"}},
}
_DRAIN_S = {
    "name": "drain_s",
    "in": "query",
    "required": False,
    "description": "How long its streams may run on; without it, cluster.drain_s.",
    "schema": {"type": "number", "minimum": 0, "maximum": 86400},
}
# Between processes of the cluster; dropped where a client sends them.
_INTERNAL = ("kvrs", "kv_transfer_params")
# What only the engine's template reads, and prompts, in the form that is checked.
_OBJECTS = {"type": ["array", "null"], "items": {"type": "object"}}
_ID = {"type": "integer", "minimum": 0, "maximum": HIGHEST_ID}
_UNDECODED: Mapping[str, dict[str, Any]] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {"type": "string"}},
        },
    },
    "tools": _OBJECTS,
    "documents": _OBJECTS,
    "chat_template_kwargs": {"type": ["object", "null"]},
    "response_format": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
    },
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": _ID},
        ]
    },
}


def clients_document() -> dict[str, Any]:
    """The API for clients."""
    return _document(
        "kvrs",
        {
            "/v1/completions": {
                "post": _streamed(_COMPLETION, _ANSWER, _request(CompletionRequest))
            },
            "/v1/chat/completions": {
                "post": _streamed(_COMPLETION, _ANSWER, _request(ChatRequest))
            },
            RESPONSES: {"post": _streamed("A response", _RESPONSE, response_schema())},
            RESPONSES + "/{id}": {
                "parameters": [_ID_IN_PATH],
                "get": _streamed("A response as it is, or its events", _RESPONSE),
                "delete": _operation("Forget a response", {"type": "object"}),
            },
            RESPONSES + "/{id}/cancel": {
                "parameters": [_ID_IN_PATH],
                "post": _operation("End a response that runs in the background", _RESPONSE),
            },
            "/generate": {"post": _streamed("DistServe's endpoint", _TEXT, _generate())},
            INVOCATIONS: {
                "post": _streamed(
                    "A completion, or a chat where it has messages",
                    _ANSWER,
                    {"anyOf": [_request(CompletionRequest), _request(ChatRequest)]},
                )
            },
            **{path: {"post": _passed(path)} for path in PASSED},
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
            "/health": {"get": _operation("As /readyz, without a text", None)},
            "/ping": {
                "get": _operation("As /health", None),
                "post": _operation("As /health", None),
            },
            "/version": {"get": _operation("The version of the engine", _VERSION)},
            "/load": {"get": _operation("How many streams are open", _LOAD)},
        },
    )


_FLEET = {
    "type": "object",
    "required": ["nodes"],
    "properties": {"nodes": {"type": "array", "items": {"type": "object"}}},
}
_PAGE = {
    "summary": "A page that shows the overview",
    "responses": {
        "200": {"description": "Done", "content": {"text/html": {"schema": {"type": "string"}}}}
    },
}


def admin_document() -> dict[str, Any]:
    """The API for operators."""
    reloaded, of_rank, ended = _schema(ReloadResult), _schema(RankOrder), _schema(ExitReport)
    return _document(
        "kvrs, admin port",
        {
            "/kvrs/v1/state": {"get": _operation("Instances, streams, recoveries", {})},
            "/kvrs/v1/overview": {"get": _operation("The same in few bytes", {})},
            "/ui": {"get": _PAGE},
            "/kvrs/v1/reload": {"post": _operation("Read the file again", reloaded)},
            "/kvrs/v1/instances": {
                "get": _operation("The fleet, as cluster.nodes of a file", _FLEET),
                "post": _operation("Add an instance to a node", reloaded, _INSTANCE),
            },
            "/kvrs/v1/instances/{id}": {
                "parameters": [_ID_IN_PATH],
                "delete": _operation("Remove an instance once its streams are gone", reloaded),
            },
            "/kvrs/v1/drain/{id}": {
                "parameters": [_ID_IN_PATH],
                "post": {
                    **_operation("Send nothing new to the instance, and move its streams", _DRAIN),
                    "parameters": [_DRAIN_S],
                },
                "delete": _operation("Use the instance again", _DRAIN),
            },
            "/kvrs/v1/leave/{id}/{rank}": {
                "parameters": [_ID_IN_PATH, _RANK_IN_PATH],
                "post": _operation("Have a rank of the instance leave it", of_rank),
                "delete": _operation("Have the rank back", of_rank),
            },
            "/kvrs/v1/exits/{id}": {
                "parameters": [_ID_IN_PATH],
                "post": _operation("Report how a process of the instance ended", _EXITED, ended),
            },
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
            "schemas": {
                "Error": _ERROR,
                **_schemas(StreamOptions),
            },
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


def _passed(path: str) -> dict[str, Any]:
    """An endpoint that vLLM checks; the proxy's own tokenizer answers it in one form."""
    properties: dict[str, Any] = {name: {} for name in ("model", *PASSED[path])}
    body = {"type": "object", "properties": properties, "additionalProperties": False}
    return _operation("As vLLM answers it, or 404 without vLLM", {"type": "object"}, body)


def _streamed(
    summary: str, answer: Mapping[str, Any], request: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An answer that is whole or a stream of events, as the request says."""
    operation = _operation(summary, answer, request)
    operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return operation


def _request(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The body as a struct reads it; backends may take further fields (docs/guide/openai.md). A
    null is as good as no field; a completion takes several prompts, each with `n` choices, which
    are `MAX_STREAMS` in all.
    """
    fields = (each for each in msgspec.structs.fields(kind) if each.encode_name not in _INTERNAL)
    schema = _schema(msgspec.defstruct(kind.__name__, [*map(_documented, fields)], kw_only=True))
    if (prompt := schema["properties"].get("prompt")) is not None:
        many = {"type": "array", "items": prompt, "minItems": 1, "maxItems": MAX_STREAMS}
        schema["properties"]["prompt"] = {"anyOf": [prompt, many]}
    return schema


def _generate() -> dict[str, Any]:
    """A completion with one text and no place for more."""
    own = {
        "prompt": {"type": "string", "minLength": 1},
        "n": {"enum": [1, None]},
        "best_of": {"enum": [1, None]},
        "use_beam_search": {"enum": [False, None]},
        "logprobs": {"type": "null"},
    }
    taken = {
        name: schema
        for name, schema in _request(CompletionRequest)["properties"].items()
        if name in ALLOWED
    }
    return {
        "type": "object",
        "required": ["prompt"],
        "properties": taken | own,
        "additionalProperties": False,
    }


def _documented(field: msgspec.structs.FieldInfo) -> tuple[str, Any] | tuple[str, Any, None]:
    """A field with what its struct does not say, for a struct that is only documented."""
    name, kind = field.encode_name, field.type
    if (more := _UNDECODED.get(name)) is not None:
        kind = Any
    elif (limits := LOGPROBS_RANGE if "logprobs" in name else RANGES.get(name)) is not None:
        more = {"minimum": limits[0], "maximum": limits[1]}
    kind = Annotated[kind, msgspec.Meta(extra_json_schema=more)]
    return (name, kind) if field.required else (name, kind | None, None)


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    found: dict[str, Any] = _schemas(kind)[kind.__name__]
    return found


def _schemas(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Those of a struct and of the structs within it, by name."""
    return msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")[1]
