"""The client of the admin port before a real one, with certificates of the openssl command."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import ADMIN_ENV_NAME, parse_config
from kvrs.errors import ConfigError
from kvrs.net.admin import AdminClient, AdminError
from kvrs_lab.load.admin_port import AdminPort
from kvrs_testkit.awaited import forked
from kvrs_testkit.certificates import MISSING, Authority
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = [
    pytest.mark.network,
    pytest.mark.process,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

TOKEN = "only for the tests: a token"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def client(
    document: dict[str, Any], environ: Mapping[str, str] | None = None, url: str | None = None
) -> AdminClient:
    return AdminClient.of(parse_config(document), environ or {}, url)


async def cause_of(asked: AdminClient) -> str:
    with pytest.raises(AdminError) as caught:
        await asyncio.to_thread(asked.state)
    return str(caught.value)


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_configuration_opens_a_port_of_a_private_ca(
    build: ProxyClusterBuilder, tmp_path: Path, token_file: Path, mutual: bool
) -> None:
    """By its own certificate and its token; what is missing is named, with the URL."""
    ca = Authority(tmp_path)
    section = ca.issue("proxy").section(ca.cert if mutual else None)
    security = {"admin_token_file": str(token_file)}
    system = await build(pairs=1, wait=False, proxy={"admin_tls": section}, security=security)
    port = system.proxy.admin_port
    tls = {"proxy": {"admin_port": port, "admin_tls": section}}
    url = f"https://127.0.0.1:{port}"

    whole = client(tls | {"security": security})
    async with AdminPort(whole) as asked:
        instances = [row["id"] for row in (await asked.state())["instances"]]
    named = client(tls | {"security": security}, url=f"https://localhost:{port}/")
    overview = await asyncio.to_thread(named.overview)

    assert instances == [row["id"] for row in overview["instances"]] == ["p0", "d0"]
    assert whole.url == url
    # The token may be that of the environment.
    assert await asyncio.to_thread(client(tls, {ADMIN_ENV_NAME: TOKEN}).state)
    assert f"{url}/kvrs/v1/state: HTTP 401; allowed: " in await cause_of(client(tls))
    strange = await cause_of(client({}, url=url))
    assert f"{url}/kvrs/v1/state: TLS: " in strange
    assert "SSL_CERT_FILE" in strange
    assert "HTTP 400" in await cause_of(client(tls, url=f"http://127.0.0.1:{port}"))
    if mutual:
        alone = {"proxy": {"admin_port": port, "admin_tls": section | {"client_ca": None}}}
        assert "a certificate of proxy.admin_tls.client_ca" in await cause_of(client(alone))


async def test_a_ca_of_the_environment_is_enough_without_a_file(
    build: ProxyClusterBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admin client trusts SSL_CERT_FILE like any other client of TLS."""
    ca = Authority(tmp_path)
    section = ca.issue("proxy").section()
    system = await build(pairs=1, wait=False, proxy={"admin_tls": section})
    monkeypatch.setenv("SSL_CERT_FILE", str(ca.cert))

    state = await asyncio.to_thread(
        client({}, url=f"https://127.0.0.1:{system.proxy.admin_port}").state
    )

    assert state["instances"]


async def test_top_shows_a_cluster_behind_a_port_with_tls_and_a_token(
    build: ProxyClusterBuilder, tmp_path: Path, token_file: Path
) -> None:
    """With the proxy's own file, and nothing else."""
    ca = Authority(tmp_path)
    proxy: dict[str, Any] = {"admin_tls": ca.issue("proxy").section(ca.cert)}
    security = {"admin_token_file": str(token_file)}
    system = await build(pairs=1, wait=False, proxy=proxy, security=security)
    file = tmp_path / "kvrs.yaml"
    proxy["admin_port"] = system.proxy.admin_port
    file.write_text(json.dumps({"proxy": proxy, "security": security}))

    running = await forked(
        *("kvrs", "top", "--once", "--config", str(file)),
        environment=os.environ,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await running.communicate()

    assert running.returncode == 0
    assert b"of 2 instances up" in output


def test_a_token_that_others_may_read_is_not_shown(token_file: Path) -> None:
    """It is no secret any more."""
    token_file.chmod(0o644)

    with pytest.raises(ConfigError, match="allowed: 0600"):
        client({"security": {"admin_token_file": str(token_file)}})


@pytest.mark.parametrize("url", ["localhost:8001", "ftp://localhost", "http://", "http://h:x"])
def test_what_is_no_url_of_http_is_refused(url: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match="allowed: http://HOST:PORT"):
        AdminClient(url)
