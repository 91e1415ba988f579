"""The model that is served, under all its names, and its adapters."""

import time
from typing import Any

import msgspec
from aiohttp import web

from kvrs.core.fleet.known import Instances
from kvrs.core.fleet.names import ServedName
from kvrs.errors import RequestError
from kvrs.proxy.api.answers import json_response


def find_model(instances: Instances, model: str | None) -> ServedName:
    """The model that a request names; before an instance is up, that may be any name.

    Raises:
        RequestError: no instance serves this name.
    """
    if model is None or model == instances.model:
        return ServedName(instances.model or "")
    if instances.model is None:
        return ServedName(model, model)
    served = instances.names.served(instances.model)
    found = served.get(model)
    if found is None:
        raise RequestError(
            f"the model {model!r:.200} does not exist; allowed: {', '.join(map(repr, served))}",
            param="model",
            status=404,
            code="model_not_found",
        )
    return found


def add_models(app: web.Application, instances: Instances) -> None:
    created = int(time.time())

    def described(model: ServedName) -> dict[str, Any]:
        found = {"id": model.name, "object": "model", "created": created, "owned_by": "kvrs"}
        # The rest as vLLM has it: clients fit their requests to the length.
        if instances.max_model_len is not None:
            found["max_model_len"] = instances.max_model_len
        if model.parent is not None:
            found |= {"root": model.root, "parent": model.parent}
        return found

    async def models(_: web.Request) -> web.Response:
        served = instances.names.served(instances.model)
        listed = [described(each) for each in served.values()]
        return json_response(msgspec.json.encode({"object": "list", "data": listed}))

    async def model(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        found = find_model(instances, name)
        if instances.model is None:
            raise RequestError(
                f"the model {name!r:.200} is not known yet: no instance has come up", status=503
            )
        return json_response(msgspec.json.encode(described(found)))

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model:.+}", model)
