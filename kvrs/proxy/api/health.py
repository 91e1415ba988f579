"""Health of the proxy in its own form and in vLLM's, and the number of open streams.

The served model, under all its names, and its adapters.
"""

import time
from typing import Any

import msgspec

from kvrs import __version__
from kvrs.core.fleet.known import Instances, ServedName, missing_roles
from kvrs.core.model.member import Health
from kvrs.errors import RequestError
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.openai.fields import SGLANG, VLLM
from kvrs.proxy.api.client_port import ClientPort, find_model, json_response


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


def add_health(routes: Routes, port: ClientPort) -> None:
    driver, instances = port.driver, port.control.instances

    async def version(_: Request) -> Response:
        """Return the version of the engine."""
        found: str | None = __version__
        if driver.engine in (VLLM, SGLANG):
            of_each = (driver.backends[one.id].engine_version for one in instances.present())
            found = next(filter(None, of_each), None)
        if found is None:
            raise RequestError("the version is not known yet: no instance is up", status=503)
        return json_response(msgspec.json.encode({"version": found}))

    async def healthz(_: Request) -> Response:
        return _text("ok\n")

    async def readyz(_: Request) -> Response:
        if port.is_leaving:
            return _text("shutting down\n", 503)
        return _text(readiness(instances), 200 if instances.ready() else 503)

    async def health(_: Request) -> Response:
        """Answer with the status of `readyz`, without a text, like vLLM."""
        return _text("", 200 if instances.ready() and not port.is_leaving else 503)

    async def load(_: Request) -> Response:
        """Return the number of open streams, like vLLM."""
        return json_response(msgspec.json.encode({"server_load": len(driver.streams)}))

    routes.add("GET", "/healthz", healthz)
    routes.add("GET", "/readyz", readyz)
    routes.add("GET", "/health", health)
    routes.add("GET", "/load", load)
    routes.add("GET", "/version", version)


def _text(text: str, status: int = 200) -> Response:
    return Response(status, text.encode(), {"Content-Type": "text/plain; charset=utf-8"})


def readiness(instances: Instances) -> str:
    """Return the text of /readyz: whether the proxy is ready, and which instances are missing."""
    if not instances.ready():
        return _unready(instances)
    if missing_roles(instances):
        return f"ready: {_missing(instances)}, decode instances compute prompts\n"
    return "ready\n"


def _missing(instances: Instances) -> str:
    missing = missing_roles(instances)
    return f"no {missing[0].value} instance is up" if len(missing) == 1 else "no instance is up"


def _unready(instances: Instances) -> str:
    """Return the causes of unreadiness: no instance that is up, then each refused instance, which
    does not come up by itself.
    """
    refused = [
        f"{known.id}: {known.reason}\n"
        for known in instances.present()
        if known.health is Health.REFUSED
    ]
    return "".join([f"{_missing(instances)}\n", *refused])
