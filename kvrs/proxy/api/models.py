"""The model that is served."""

import time
from typing import Any

import msgspec
from aiohttp import web

from kvrs.control.fleet import Instances
from kvrs.errors import RequestError
from kvrs.proxy.api.answers import json_response


def check_model(instances: Instances, model: str | None) -> None:
    """Refuse another model than the one served; before an instance is up, any is accepted."""
    served = instances.model
    if model is not None and served is not None and model != served:
        raise RequestError(
            f"the model {model!r:.200} does not exist; allowed: {served!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def add_models(app: web.Application, instances: Instances) -> None:
    created = int(time.time())

    def described(model: str) -> dict[str, Any]:
        found = {"id": model, "object": "model", "created": created, "owned_by": "kvrs"}
        # As vLLM has it: clients fit their requests to it.
        most = instances.max_model_len
        return found if most is None else found | {"max_model_len": most}

    async def models(_: web.Request) -> web.Response:
        served = instances.model
        listed = [] if served is None else [described(served)]
        return json_response(msgspec.json.encode({"object": "list", "data": listed}))

    async def model(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        check_model(instances, name)
        if instances.model is None:
            raise RequestError(
                f"the model {name!r:.200} is not known yet: no instance has come up", status=503
            )
        return json_response(msgspec.json.encode(described(name)))

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model:.+}", model)
