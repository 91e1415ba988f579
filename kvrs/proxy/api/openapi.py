"""The OpenAPI documents of the clients' port and of the admin port, at `/openapi.json` of each. The
fields of requests are those of the structs that parse them.
"""

import re
from collections.abc import Callable, Mapping
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
from kvrs.proxy.api.passed import PATHS as PASSED
from kvrs.proxy.fleet.orders import RankOrder
from kvrs.proxy.reload import ReloadResult

PATH = "/openapi.json"

Schema = dict[str, Any]


def _object(*optional: str, **properties: Schema) -> Schema:
    """An object with these properties, all of them required but for the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_ANY_OBJECT: Schema = {"type": "object"}
_TEXT, _MAYBE_TEXT = {"type": "string"}, {"type": ["string", "null"]}
_INTEGER, _NATURAL = {"type": "integer"}, {"type": "integer", "minimum": 0}
_MAYBE_OBJECT = {"type": ["object", "null"]}

_ERROR = _object(
    error=_object(
        "faults",
        message=_TEXT,
        type=_TEXT,
        param=_MAYBE_TEXT,
        code=_MAYBE_TEXT,
        faults=_list(_TEXT),
    )
)
_MODEL = _object(id=_TEXT, object={"const": "model"})
_MODELS = _object(object={"const": "list"}, data=_list(_MODEL))
_ANSWER = _object(
    "usage",
    id=_TEXT,
    object={"enum": ["text_completion", "chat.completion"]},
    created=_INTEGER,
    model=_TEXT,
    choices=_list(_ANY_OBJECT),
    usage=_ANY_OBJECT,
)
_STATUSES = ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_RESPONSE = _object(
    id=_TEXT,
    object={"const": "response"},
    created_at=_INTEGER,
    status={"enum": _STATUSES},
    model=_TEXT,
    output=_list(_ANY_OBJECT),
    usage=_MAYBE_OBJECT,
)
_GENERATED = _object(
    text=_TEXT, timestamps=_list({"type": "number"}), lifetime_events={"type": "array"}
)
_INSTANCE = _object(
    *("agent", "host"),
    node=_TEXT,
    agent=_MAYBE_OBJECT,
    id=_TEXT,
    role={"enum": ["prefill", "decode", "both"]},
    host=_TEXT,
    port={"type": "integer", "minimum": 1, "maximum": 65535},
)
_FLEET = _object(nodes=_list(_ANY_OBJECT))
_DRAIN = _object(instance=_TEXT, drain_s={"type": ["number", "null"]})
_DRAIN_S = {
    "name": "drain_s",
    "in": "query",
    "required": False,
    "description": "How long its streams may run on; without it, cluster.drain_s.",
    "schema": {"type": "number", "minimum": 0, "maximum": 86400},
}
_IN_PATH = re.compile(r"{(\w+)}")
_COMPLETION = "A completion, whole or as a stream of events"
_PAGE = {
    "summary": "A page that shows the overview",
    "responses": {"200": {"description": "Done", "content": {"text/html": {"schema": _TEXT}}}},
}
# Between processes of the cluster; dropped where a client sends them.
_INTERNAL = ("kvrs", "kv_transfer_params")
# What only the engine's template reads, and prompts, in the form that is checked.
_OBJECTS = {"type": ["array", "null"], "items": _ANY_OBJECT}
_ID = {"type": "integer", "minimum": 0, "maximum": HIGHEST_ID}
_UNDECODED: Mapping[str, Schema] = {
    "messages": _list(_object(role=_TEXT)) | {"minItems": 1},
    "tools": _OBJECTS,
    "documents": _OBJECTS,
    "chat_template_kwargs": _MAYBE_OBJECT,
    "response_format": _object(type={"enum": ["text", "json_object", "json_schema"]})
    | _MAYBE_OBJECT,
    "prompt": {"anyOf": [_TEXT | {"minLength": 1}, _list(_ID) | {"minItems": 1}]},
}


def clients_document() -> Schema:
    """The API for clients."""
    completion, chat = _request(CompletionRequest), _request(ChatRequest)
    return _document(
        "kvrs",
        {
            "POST /v1/completions": _streamed(_COMPLETION, _ANSWER, completion),
            "POST /v1/chat/completions": _streamed(_COMPLETION, _ANSWER, chat),
            f"POST {RESPONSES}": _streamed("A response", _RESPONSE, response_schema()),
            f"GET {RESPONSES}/{{id}}": _streamed("A response as it is, or its events", _RESPONSE),
            f"DELETE {RESPONSES}/{{id}}": _operation("Forget a response", _ANY_OBJECT),
            f"POST {RESPONSES}/{{id}}/cancel": _operation(
                "End a response that runs in the background", _RESPONSE
            ),
            "POST /generate": _streamed("DistServe's endpoint", _GENERATED, _generate()),
            **{f"POST {path}": _passed() for path in PASSED},
            "GET /v1/models": _operation("Served models", _MODELS),
            "GET /v1/models/{model}": _operation("One model", _MODEL),
            "GET /healthz": _operation("Whether the process runs", None),
            "GET /readyz": _operation("Whether a stream could start now", None),
            "GET /health": _operation("As /readyz, without a text", None),
            "GET /version": _operation("The version of the engine", _object(version=_TEXT)),
            "GET /load": _operation("How many streams are open", _object(server_load=_NATURAL)),
        },
    )


def admin_document() -> Schema:
    """The API for operators."""
    reloaded, of_rank, ended = _schema(ReloadResult), _schema(RankOrder), _schema(ExitReport)
    exited = _object(instance=_TEXT, start=_INTEGER)
    drain = _operation("Send nothing new to the instance, and move its streams", _DRAIN)
    return _document(
        "kvrs, admin port",
        {
            "GET /kvrs/v1/state": _operation("Instances, streams, recoveries", {}),
            "GET /kvrs/v1/overview": _operation("The same in few bytes", {}),
            "GET /ui": _PAGE,
            "POST /kvrs/v1/reload": _operation("Read the file again", reloaded),
            "GET /kvrs/v1/instances": _operation("The fleet, as cluster.nodes of a file", _FLEET),
            "POST /kvrs/v1/instances": _operation("Add an instance to a node", reloaded, _INSTANCE),
            "DELETE /kvrs/v1/instances/{id}": _operation(
                "Remove an instance once its streams are gone", reloaded
            ),
            "POST /kvrs/v1/drain/{id}": drain | {"parameters": [_DRAIN_S]},
            "DELETE /kvrs/v1/drain/{id}": _operation("Use the instance again", _DRAIN),
            "POST /kvrs/v1/leave/{id}/{rank}": _operation(
                "Have a rank of the instance leave it", of_rank
            ),
            "DELETE /kvrs/v1/leave/{id}/{rank}": _operation("Have the rank back", of_rank),
            "POST /kvrs/v1/exits/{id}": _operation(
                "Report how a process of the instance ended", exited, ended
            ),
            "GET /metrics": _operation("Metrics for Prometheus", None),
            "GET /healthz": _operation("Whether the process runs", None),
        },
    )


def add_document(app: web.Application, document: Callable[[], Schema]) -> None:
    """Serve a document at `/openapi.json`, made when it is asked for."""

    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(document()), content_type="application/json")

    app.router.add_get(PATH, serve)


def _document(title: str, operations: Mapping[str, Schema]) -> Schema:
    """The document of these operations, each under its method and path."""
    own = {f"GET {PATH}": _operation("This document", {})}
    paths: dict[str, Schema] = {}
    for key, operation in {**operations, **own}.items():
        method, path = key.split(" ")
        item = paths.setdefault(path, {})
        item[method.lower()] = operation
        if names := _IN_PATH.findall(path):
            item["parameters"] = [_in_path(name) for name in names]
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, **_schemas(StreamOptions)},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _in_path(name: str) -> Schema:
    schema = _NATURAL if name == "rank" else _TEXT
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _operation(summary: str, answer: Schema | None, request: Schema | None = None) -> Schema:
    """`answer`: the schema of JSON; None: text."""
    found = {"text/plain": {"schema": _TEXT}} if answer is None else _json(answer)
    error = _json({"$ref": "#/components/schemas/Error"})
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done", "content": found},
            "default": {"description": "An error in OpenAI's form", "content": error},
        },
    }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": _json(request)}
    return operation


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _passed() -> Schema:
    """An endpoint that vLLM checks; the proxy's own tokenizer answers it in one form."""
    return _operation("As vLLM answers it, or 404 without vLLM", _ANY_OBJECT, _ANY_OBJECT)


def _streamed(summary: str, answer: Schema, request: Schema | None = None) -> Schema:
    """An answer that is whole or a stream of events, as the request says."""
    operation = _operation(summary, answer, request)
    operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return operation


def _request(kind: type[msgspec.Struct]) -> Schema:
    """The body as a struct reads it; backends may take further fields (docs/guide/openai.md). A
    null is as good as no field; a completion takes several prompts, each with `n` choices, which
    are `MAX_STREAMS` in all.
    """
    fields = (each for each in msgspec.structs.fields(kind) if each.encode_name not in _INTERNAL)
    schema = _schema(msgspec.defstruct(kind.__name__, [*map(_documented, fields)], kw_only=True))
    if (prompt := schema["properties"].get("prompt")) is not None:
        many = _list(prompt) | {"minItems": 1, "maxItems": MAX_STREAMS}
        schema["properties"]["prompt"] = {"anyOf": [prompt, many]}
    return schema


def _generate() -> Schema:
    """A completion with one text and no place for more."""
    own = {
        "prompt": _TEXT | {"minLength": 1},
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
    optional = (taken | own).keys() - {"prompt"}
    return _object(*optional, **taken | own) | {"additionalProperties": False}


def _documented(field: msgspec.structs.FieldInfo) -> tuple[str, Any] | tuple[str, Any, None]:
    """A field with what its struct does not say, for a struct that is only documented."""
    name, kind = field.encode_name, field.type
    if (more := _UNDECODED.get(name)) is not None:
        kind = Any
    elif (limits := LOGPROBS_RANGE if "logprobs" in name else RANGES.get(name)) is not None:
        more = {"minimum": limits[0], "maximum": limits[1]}
    kind = Annotated[kind, msgspec.Meta(extra_json_schema=more)]
    return (name, kind) if field.required else (name, kind | None, None)


def _schema(kind: type[msgspec.Struct]) -> Schema:
    found: Schema = _schemas(kind)[kind.__name__]
    return found


def _schemas(kind: type[msgspec.Struct]) -> Schema:
    """Those of a struct and of the structs within it, by name."""
    return msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")[1]
