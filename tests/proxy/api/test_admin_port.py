"""The operator's port: its token, and a host apart from that of clients."""

import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.file import ADMIN_ENV_NAME, parse_config
from kvrs.errors import ConfigError
from kvrs.net.admin import AdminClient, AdminError
from kvrs.proxy.server import Proxy
from kvrs_lab.load.admin_port import AdminPort
from kvrs_testkit.scripted import SECRET
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

TOKEN = "only for the tests: a token"


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\nthe former token of operators\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("path", ["/kvrs/v1/state", "/metrics"])
@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        (TOKEN, 401),
        (f"Bearer {TOKEN}", 200),
        ("Bearer the former token of operators", 200),
    ],
)
async def test_only_a_token_opens_the_admin_port(
    build: ProxyClusterBuilder, token_file: str, path: str, given: str | None, status: int
) -> None:
    """State and metrics tell processes, addresses and load. Each line of the file is accepted."""
    system = await build(pairs=1, wait=False, security={"admin_token_file": token_file})
    headers = {} if given is None else {"Authorization": given}
    url = f"http://127.0.0.1:{system.proxy.admin_port}"

    async with system.http.get(url + path, headers=headers) as answer:
        found = answer.status
    async with system.http.get(f"{url}/healthz") as answer:
        alive = answer.status

    assert (found, alive) == (status, 200)


async def test_a_token_is_replaced_without_a_restart(
    build: ProxyClusterBuilder, token_file: str
) -> None:
    """From a reload on the new one opens the port, and the old one does not; a bad file changes
    nothing.
    """
    system = await build(pairs=1, wait=False, security={"admin_token_file": token_file})
    url = f"http://127.0.0.1:{system.proxy.admin_port}"

    async def status(token: str, path: str = "/metrics") -> int:
        headers = {"Authorization": f"Bearer {token}"}
        method = "POST" if path.endswith("reload") else "GET"
        async with system.http.request(method, url + path, headers=headers) as answer:
            return answer.status

    Path(token_file).write_text("short")
    refused = await status(TOKEN, "/kvrs/v1/reload")
    before = await status(TOKEN)
    Path(token_file).write_text("the next token of operators")
    taken = await status(TOKEN, "/kvrs/v1/reload")

    assert (refused, before, taken) == (400, 200, 200)
    assert [await status(each) for each in (TOKEN, "the next token of operators")] == [401, 200]


async def test_without_a_configured_token_none_is_needed(build: ProxyClusterBuilder) -> None:
    """On loopback, which is all that such a port may listen at."""
    system = await build(pairs=1, wait=False)

    assert (await system.state())["instances"]


async def test_the_load_generator_shows_its_token(
    build: ProxyClusterBuilder, token_file: str
) -> None:
    """Faults can be injected, and a run can wait for all instances, at a protected port too."""
    system = await build(pairs=1, wait=False, security={"admin_token_file": token_file})
    url = f"http://127.0.0.1:{system.proxy.admin_port}"

    async with AdminPort(AdminClient(url, TOKEN.encode())) as port:
        state = await port.state()
    async with AdminPort(AdminClient(url)) as port:
        with pytest.raises(AdminError, match=r"HTTP 401; allowed: .*KVRS_ADMIN_TOKEN"):
            await port.state()
    async with AdminPort(AdminClient(url.replace("http", "https"))) as port:
        with pytest.raises(AdminError, match="TLS: the answer is not TLS; allowed: http://"):
            await port.state()

    assert state["instances"]


async def test_the_ports_listen_at_hosts_of_their_own(build: ProxyClusterBuilder) -> None:
    """To serve clients on a network card publishes neither state nor metrics."""
    hosts = {"host": "127.0.0.1", "admin_host": "127.0.0.2", "peer_host": "127.0.0.3"}
    with socket.socket() as free:
        free.bind(("127.0.0.3", 0))
        peer_port = free.getsockname()[1]
    system = await build(pairs=1, wait=False, proxy=hosts | {"peer_port": peer_port})
    proxy = system.proxy

    reached = {
        (host, port): await answers(system.http, host, port)
        for host in hosts.values()
        for port in (proxy.port, proxy.admin_port, peer_port)
    }

    assert [address for address, yes in reached.items() if yes] == [
        ("127.0.0.1", proxy.port),
        ("127.0.0.2", proxy.admin_port),
        ("127.0.0.3", peer_port),
    ]


async def answers(http: aiohttp.ClientSession, host: str, port: int) -> bool:
    try:
        async with http.get(f"http://{host}:{port}/healthz"):
            return True
    except aiohttp.ClientConnectionError:
        return False


@pytest.mark.parametrize(
    ("hosts", "key"),
    [({"host": "0.0.0.0"}, "proxy.host"), ({"admin_host": "0.0.0.0"}, "proxy.admin_host")],
)
async def test_a_proxy_beyond_loopback_without_credentials_does_not_start(
    hosts: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fatal, not a warning: nothing has been bound."""
    monkeypatch.delenv(ADMIN_ENV_NAME, raising=False)
    instances = [{"id": "e0", "role": "both", "port": 9, "page_port": 8}]
    cluster = {"nodes": [{"id": "n0", "instances": instances}]}
    ports = {"port": 0, "admin_port": 0}
    proxy = Proxy(parse_config({"proxy": ports | hosts, "cluster": cluster}), SECRET)

    with pytest.raises(ConfigError, match=rf"{key}: got '0\.0\.0\.0'"):
        await proxy.start()

    assert (proxy.port, proxy.admin_port) == (0, 0)
