"""The served model, under all its names, and its adapters."""

import time
from typing import Any

import msgspec

from kvrs.core.fleet.known import Instances, ServedName
from kvrs.errors import RequestError
from kvrs.net.routes import Request, Response, Routes
from kvrs.proxy.api.answers import json_response
from kvrs.proxy.api.client_port import find_model


def _described(instances: Instances, model: ServedName, created: int) -> dict[str, Any]:
    found = {"id": model.name, "object": "model", "created": created, "owned_by": "kvrs"}
    # Like vLLM, the answer has the longest length, to which clients fit their requests.
    if instances.max_model_len is not None:
        found["max_model_len"] = instances.max_model_len
    if model.parent is not None:
        found |= {"root": model.root, "parent": model.parent}
    return found


def add_models(routes: Routes, instances: Instances) -> None:
    created = int(time.time())

    async def models(_: Request) -> Response:
        served = instances.served_names().values()
        listed = [_described(instances, each, created) for each in served]
        return json_response(msgspec.json.encode({"object": "list", "data": listed}))

    async def model(request: Request) -> Response:
        name = request.parameters["model"]
        found = find_model(instances, name)
        if instances.model is None:
            raise RequestError(
                f"the model {name!r:.200} is not known yet: no instance has come up", status=503
            )
        return json_response(msgspec.json.encode(_described(instances, found, created)))

    routes.add("GET", "/v1/models", models)
    routes.add("GET", "/v1/models/{model:.+}", model)
