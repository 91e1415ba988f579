"""Web pages of other sites at the clients' port, which it may be told to allow (CORS)."""

from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDictProxy

from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

SITE, OTHER = "https://chat.example.org", "https://evil.example.org"
ALLOWED = "Access-Control-Allow-Origin"
ASKED: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


async def headers_of(
    system: ProxyCluster, method: str, path: str, origin: str | None, **asked: Any
) -> tuple[int, CIMultiDictProxy[str]]:
    headers = asked.pop("headers", {}) | ({} if origin is None else {"Origin": origin})
    async with system.http.request(method, system.url + path, headers=headers, **asked) as answer:
        await answer.read()
        return answer.status, answer.headers


# Served with and without aiohttp's server, streamed, refused by its body, its path and its method.
REQUESTS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "whole": (200, "POST", "/v1/completions", {"json": ASKED}),
    "stream": (200, "POST", "/v1/completions", {"json": ASKED | {"stream": True}}),
    "models": (200, "GET", "/v1/models", {}),
    "refused": (400, "POST", "/v1/completions", {"json": {}}),
    "no-path": (404, "GET", "/nowhere", {}),
    "no-method": (405, "GET", "/v1/completions", {}),
    "late-body": (
        200,
        "POST",
        "/v1/completions",
        {"json": ASKED | {"stream": True}, "headers": {"Expect": "100-continue"}},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_page_may_read_answers_where_its_site_is_allowed(
    build: ProxyClusterBuilder, name: str
) -> None:
    """Errors too: a page could not tell a refusal from a dead network."""
    system = await build(pairs=1, proxy={"allowed_origins": [SITE]})
    status, method, path, asked = REQUESTS[name]

    found = await headers_of(system, method, path, SITE, **asked)
    foreign = await headers_of(system, method, path, OTHER, **asked)
    program = await headers_of(system, method, path, None, **asked)

    assert (found[0], found[1].getall(ALLOWED)) == (status, [SITE])
    assert found[1]["Vary"] == "Origin"
    for other in (foreign, program):
        assert other[0] == status
        assert ALLOWED not in other[1]


async def test_a_browser_may_ask_before_a_request(build: ProxyClusterBuilder) -> None:
    """Without a key, which browsers do not send then; for all paths alike."""
    system = await build(pairs=1, proxy={"allowed_origins": [SITE]})

    for path in ("/v1/completions", "/v1/models", "/v1/responses/x"):
        status, found = await headers_of(system, "OPTIONS", path, SITE, headers=PREFLIGHT)
        refused, headers = await headers_of(system, "OPTIONS", path, OTHER, headers=PREFLIGHT)

        assert (status, found[ALLOWED]) == (200, SITE)
        assert found["Access-Control-Allow-Headers"] == "authorization, content-type"
        assert {"GET", "POST", "DELETE"} == set(found["Access-Control-Allow-Methods"].split(", "))
        assert int(found["Access-Control-Max-Age"]) > 0
        assert refused == 403
        assert ALLOWED not in headers
    assert not any(instance.bodies for instance in system.instances.values())


async def test_all_sites_may_be_allowed(build: ProxyClusterBuilder) -> None:
    system = await build(pairs=1, proxy={"allowed_origins": ["*"]})

    _, found = await headers_of(system, "GET", "/v1/models", OTHER)

    assert found[ALLOWED] == "*"


async def test_no_page_is_allowed_unless_it_is_said(build: ProxyClusterBuilder) -> None:
    system = await build(pairs=1)

    status, preflight = await headers_of(system, "OPTIONS", "/v1/models", SITE, headers=PREFLIGHT)
    served, answer = await headers_of(system, "GET", "/v1/models", SITE)

    assert (status, served) == (405, 200)
    assert ALLOWED not in preflight
    assert ALLOWED not in answer


async def test_keys_are_required_of_pages_too(build: ProxyClusterBuilder, tmp_path: Path) -> None:
    """The page may read why it is refused, and the question before needs no key."""
    keys = tmp_path / "keys"
    keys.write_text('{"a": {"keys": ["%s"]}}' % ("0" * 64))
    keys.chmod(0o600)
    security = {"key_file": str(keys)}
    system = await build(pairs=1, proxy={"allowed_origins": [SITE]}, security=security)

    asked, _ = await headers_of(system, "OPTIONS", "/v1/models", SITE, headers=PREFLIGHT)
    status, found = await headers_of(system, "GET", "/v1/models", SITE)

    assert (asked, status, found[ALLOWED]) == (200, 401, SITE)


@pytest.mark.parametrize("origin", ["chat.example.org", "https://a/b", "https://", "", "a b://c"])
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    """It would allow nothing."""
    with pytest.raises(ConfigError, match=r"proxy.allowed_origins.*allowed: \*, or SCHEME"):
        parse_config({"proxy": {"allowed_origins": [origin]}})
