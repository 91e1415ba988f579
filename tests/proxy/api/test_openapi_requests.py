"""Requests that schemathesis makes of the OpenAPI documents, against a proxy and a tiny engine."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.proxy.server import Proxy
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.server import serve_http
from kvrs_testkit.examples import scaled
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import WITHIN_S
from tests.agent.agents import SECRET
from tests.proxy.api.openapi_files import ADMIN, CLIENTS, load

pytestmark = [pytest.mark.network, pytest.mark.engine]

EXAMPLES, OF_OTHERS = max(60, scaled(60)), scaled(20)  # Of requests for streams, and of all others.
STREAMS = {"POST /v1/completions", "POST /v1/chat/completions"}
# Which values go together is not part of the documents: a request that fits may still get 400.
NOT_CHECKED: list[Any] = [positive_data_acceptance]
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
MEDIA_TYPES = ("text/plain", "application/xml", "application/x-www-form-urlencoded", "nonsense", "")


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    """With one instance of both roles, up; requests take milliseconds there."""
    write_tiny_model(tmp_path / "tiny", seed=0)
    port, page_port = free_ports(2)
    instance = {"id": "e0", "role": "both", "port": port, "page_port": page_port}
    config = parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0, "load_interval_s": 0.05},
            "cluster": {
                "model": str(tmp_path / "tiny"),
                "nodes": [{"id": "n0", "instances": [instance]}],
                "engine": {"max_model_len": 64},
            },
        }
    )
    async with AsyncExitStack() as stack:
        engine = EngineInstance(config, InstanceId("e0"), 1, SECRET)
        await stack.enter_async_context(serve_http(engine, allow_faults=False))
        proxy = Proxy(config, SECRET)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        ready = f"http://127.0.0.1:{proxy.port}/readyz"
        async with asyncio.timeout(WITHIN_S):
            while (await asyncio.to_thread(requests.get, ready, timeout=60)).status_code != 200:
                await asyncio.sleep(0.02)
        yield proxy


def ports(proxy: Proxy) -> list[tuple[str, Path]]:
    """URLs of the client port and of the admin port, each with its document."""
    return [
        (f"http://127.0.0.1:{proxy.port}", CLIENTS),
        (f"http://127.0.0.1:{proxy.admin_port}", ADMIN),
    ]


def operations(document: Path) -> Iterator[Any]:
    for found in schemathesis.openapi.from_path(document).get_all_operations():
        assert isinstance(found, Ok), found
        yield found.ok()


def statuses(url: str, operation: Any, mode: schemathesis.GenerationMode) -> Counter[int]:
    """Statuses of requests that fit the document, or do not; every answer is checked against it."""
    found: Counter[int] = Counter()
    of_query_or_body = [*operation.query, *operation.body]
    texts = [each.definition["schema"] == {"type": "string"} for each in operation.path_parameters]
    if mode is schemathesis.GenerationMode.NEGATIVE and not of_query_or_body and all(texts):
        return found  # Every request fits: to look for another one takes a second.

    @settings(
        max_examples=EXAMPLES if operation.label in STREAMS else OF_OTHERS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case[Any]) -> None:
        answer = case.call(base_url=url, timeout=60)
        found[answer.status_code] += 1
        case.validate_response(answer, excluded_checks=NOT_CHECKED)

    try:
        run()
    except Unsatisfiable:
        assert not operation.body  # Every request without a body fits.
    return found


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(schemathesis.GenerationMode.POSITIVE, marks=pytest.mark.nightly),
        schemathesis.GenerationMode.NEGATIVE,
    ],
)
async def test_answers_to_generated_requests_are_as_documented(
    proxy: Proxy, mode: schemathesis.GenerationMode
) -> None:
    """No request is an internal error; what fits is served in part, what does not is refused."""

    def ask() -> dict[str, Counter[int]]:
        return {
            operation.label: statuses(url, operation, mode)
            for url, document in ports(proxy)
            for operation in operations(document)
        }

    found = await asyncio.to_thread(ask)

    assert found.keys() >= STREAMS
    for label in STREAMS:
        if mode is schemathesis.GenerationMode.POSITIVE:
            assert found[label][200] >= 5, found
        else:
            assert sum(found[label].values()) == found[label][400] == EXAMPLES, found


async def test_other_methods_and_media_types_are_answered_as_documented(proxy: Proxy) -> None:
    """A method that a path does not have gets 405 with those that it has; the body is what counts,
    whatever its type is called.
    """

    def ask() -> None:
        for url, document in ports(proxy):
            for template, item in load(document)["paths"].items():
                path = template.replace("{", "").replace("}", "")
                for method in METHODS:
                    if method.lower() in item:
                        continue
                    answer = requests.request(method, url + path, timeout=60)
                    assert answer.status_code == 405, (method, path)
                    allowed = set(answer.headers["Allow"].lower().split(","))
                    assert allowed - {"head"} == item.keys() - {"parameters"}, path
                    _check_error(answer)
                for media_type in MEDIA_TYPES if "post" in item else ():
                    for body in (
                        b"",
                        b"a=b",
                        b"<a/>",
                        b"\xff",
                        b'{"prompt": "a", "max_tokens": 1}',
                    ):
                        headers = {"Content-Type": media_type}
                        answer = requests.post(url + path, data=body, headers=headers, timeout=60)
                        assert answer.status_code < 500, (path, media_type, body)
                        if answer.status_code != 200:
                            _check_error(answer)
            answer = requests.get(f"{url}/no/such/path", timeout=60)
            assert answer.status_code == 404
            _check_error(answer)

    await asyncio.to_thread(ask)


def _check_error(answer: requests.Response) -> None:
    names = {"message", "type"}
    if "/v1/messages" not in answer.url:
        names |= {"param", "code"}
    assert json.loads(answer.content)["error"].keys() >= names
