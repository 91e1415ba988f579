"""Endpoint picker of a gateway in front (Gateway API Inference Extension, endpoint picker protocol
1.0): the instances that it picks for a request, the one that served it, and the load that it is
told.
"""

from functools import partial
from urllib.parse import urlsplit

import msgspec

from kvrs.core.fleet.known import Instances
from kvrs.net.routes import Request
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.wire.requests import RequestContext

# Endpoints `ADDRESS:PORT,ADDRESS:PORT,...`, the preferred one first; llm-d's picker names the
# prefill instance apart.
_PICKED = ("x-gateway-destination-endpoint", "x-prefiller-host-port")
_SERVED = "x-gateway-destination-endpoint-served"
# Open Request Cost Aggregation: the format that a caller asks for, and the load in the answer.
_FORMAT, _LOAD = "endpoint-load-metrics-format", "endpoint-load-metrics"


class ClusterLoad(msgspec.Struct, frozen=True):
    """Load of all instances that are up, as an endpoint picker measures a model server."""

    queued: int
    running: int
    kv_usage: float | None  # Share of the pages in use, of instances that decode; None: unknown.


def cluster_load(instances: Instances) -> ClusterLoad:
    loads = [(each, each.load) for each in instances.present() if each.load is not None]
    pages = [(load.free_pages, load.total_pages) for each, load in loads if each.abilities.decodes]
    total = sum(its for _, its in pages)
    return ClusterLoad(
        sum(load.queued for _, load in loads),
        sum(load.running for _, load in loads),
        max(0.0, 1 - sum(free for free, its in pages if its) / total) if total else None,
    )


class EndpointPicker:
    """Reads the instances that the picker names in a request's headers, and makes the headers of
    the response. An endpoint that is no instance of the cluster is ignored.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def begin(self, request: Request, context: RequestContext) -> None:
        headers = request.headers
        named = [value for key in _PICKED for value in headers.getall(key, ())]
        if named:
            known = {_endpoint(each): name for name, each in self._driver.backends.items()}
            found = (known.get(each.strip()) for each in ",".join(named).split(","))
            context.picked = tuple(name for name in found if name is not None)
        if named or _FORMAT in headers:
            request.head = partial(self._head, context, headers.get(_FORMAT, "").upper())

    def _head(self, context: RequestContext, form: str) -> dict[str, str]:
        head = {}
        if context.served is not None and context.served in self._driver.backends:
            head[_SERVED] = _endpoint(self._driver.backends[context.served])
        load = cluster_load(self._driver.control.instances)
        named = {"kv_cache_usage_perc": load.kv_usage, "num_requests_waiting": load.queued}
        values = {name: value for name, value in named.items() if value is not None}
        if form == "JSON":
            head[_LOAD] = f"JSON {msgspec.json.encode({'named_metrics': values}).decode()}"
        elif form == "TEXT":
            metrics = (f"named_metrics.{name}={value:g}" for name, value in values.items())
            head[_LOAD] = f"TEXT {', '.join(metrics)}"
        return head


def _endpoint(backend: Backend) -> str:
    return urlsplit(backend.url).netloc
