"""TLS at the clients' port and the admin port, with certificates of the openssl command."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec
import openai
import pytest

from kvrs.config.proxy import ProxySettings
from kvrs.errors import ConfigError
from kvrs.net import server, tls
from kvrs.net.connections import ConnectionLimits
from kvrs_lab.cluster.proxies import ProxyProcess
from kvrs_testkit.certificates import MISSING, Authority, Pair
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = [
    pytest.mark.network,
    pytest.mark.process,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

BODY = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def served(ca: Authority) -> Pair:
    return ca.issue("proxy")


def url_of(system: ProxyCluster) -> str:
    return f"https://127.0.0.1:{system.proxy.port}/v1/completions"


async def status_for(system: ProxyCluster, context: ssl.SSLContext) -> int:
    """0: there is no connection."""
    async with aiohttp.ClientSession() as client:
        try:
            async with client.post(url_of(system), json=BODY, ssl=context) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0


async def serial_of(system: ProxyCluster, context: ssl.SSLContext) -> Any:
    """The serial number of the certificate that the proxy shows."""
    _, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port, ssl=context)
    found = writer.get_extra_info("peercert")
    writer.transport.abort()
    return found["serialNumber"]


async def test_the_openai_client_streams_over_https(
    build: ProxyClusterBuilder, ca: Authority, served: Pair
) -> None:
    """Nothing but the URL and the CA differs for a client."""
    system = await build(proxy={"tls": served.section()})
    async with openai.AsyncOpenAI(
        base_url=f"https://127.0.0.1:{system.proxy.port}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=ca.client()),
    ) as client:
        stream = await client.completions.create(
            model="scripted", prompt=[1, 2, 3], max_tokens=5, temperature=0, stream=True
        )
        pieces = [event.choices[0].text async for event in stream]

    assert "".join(pieces)
    assert (await system.state())["proxies"][0]["url"].startswith("https://")


async def test_clients_need_a_certificate_of_the_ca(
    build: ProxyClusterBuilder, ca: Authority, served: Pair, tmp_path: Path
) -> None:
    """With `client_ca` a client without one, with an expired one or with one of another CA is not
    served.
    """
    stranger = Authority(tmp_path, "stranger").issue("client")
    system = await build(proxy={"tls": served.section(ca.cert)})

    statuses = [
        await status_for(system, ca.client(pair))
        for pair in (ca.issue("client"), None, ca.issue("expired", days=-1), stranger)
    ]

    assert statuses == [200, 0, 0, 0]


async def test_a_client_refuses_a_proxy_of_another_ca(
    build: ProxyClusterBuilder, served: Pair, tmp_path: Path
) -> None:
    system = await build(proxy={"tls": served.section()}, pairs=1)

    assert await status_for(system, Authority(tmp_path, "other").client()) == 0


async def test_plain_http_at_a_tls_port_is_told_so(
    build: ProxyClusterBuilder, served: Pair
) -> None:
    """Not a broken connection without a reason; nothing is served."""
    system = await build(proxy={"tls": served.section()}, pairs=1)

    async with system.http.post(f"{system.url}/v1/completions", json=BODY) as answer:
        error = msgspec.json.decode(await answer.read())["error"]

    assert answer.status == 400
    assert error["message"] == "this port speaks TLS only: use https://"


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00"])
async def test_a_hand_shake_that_drips_is_cut_off(
    build: ProxyClusterBuilder, served: Pair, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow hand-shake has the limit of a silent connection."""
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    system = await build(proxy={"tls": served.section()}, pairs=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    writer.write(sent)

    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_hand_shakes_count_as_connections(
    build: ProxyClusterBuilder, ca: Authority, served: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the port has room for, and an honest client is served: the oldest are ended."""
    system = await build(proxy={"tls": served.section()}, pairs=1)
    (port,) = [each for each in system.proxy._ports if each.port == system.proxy.port]
    monkeypatch.setattr(port.among, "_limits", ConnectionLimits(8, 8))
    silent = [await asyncio.open_connection("127.0.0.1", system.proxy.port) for _ in range(12)]

    status = await status_for(system, ca.client())

    assert status == 200
    async with asyncio.timeout(10):
        for reader, _ in silent[:4]:
            assert await reader.read() == b""
    for _, writer in silent:
        writer.close()


async def test_a_new_certificate_is_shown_while_a_stream_flows(
    build: ProxyClusterBuilder, ca: Authority, served: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are looked at, no signal is needed, and the stream is not touched."""
    monkeypatch.setattr(tls, "LOOK_INTERVAL_S", 0.02)
    system = await build(proxy={"tls": served.section()})
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    before = await serial_of(system, ca.client())
    async with system.http.post(
        url_of(system), json=BODY | {"stream": True}, ssl=ca.client()
    ) as stream:
        first = await stream.content.readuntil(b"\n\n")
        served.replace(ca.issue("renewed"))

        async def is_new() -> bool:
            return bool(await serial_of(system, ca.client()) != before)

        await system.until(is_new)
        system.script.gate.set()
        rest = await stream.read()

    assert first.startswith(b"data: ")
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_ca_that_was_replaced_is_trusted_no_more(
    build: ProxyClusterBuilder, ca: Authority, served: Pair, tmp_path: Path
) -> None:
    """Its clients are refused from the reload on, and those of the new CA are served."""
    other = Authority(tmp_path, "other")
    old, new = ca.issue("old"), other.issue("new")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(ca.cert.read_bytes())
    system = await build(proxy={"tls": served.section(trusted)}, pairs=1)
    before = [await status_for(system, ca.client(pair)) for pair in (old, new)]
    trusted.write_bytes(other.cert.read_bytes())

    result = await system.proxy.reloads.reload()

    after = [await status_for(system, ca.client(pair)) for pair in (old, new)]
    assert (before, after) == ([200, 0], [0, 200])
    assert result.applied == ["certificates"]


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        ("expired", r"proxy\.tls\.cert: .*proxy\.pem: certificate has expired"),
        ("other key", r"proxy\.tls\.key: .*proxy\.key: is not the key of .*proxy\.pem"),
        ("no pem", r"proxy\.tls\.cert: .*proxy\.pem: no certificate in PEM"),
        ("no key", r"proxy\.tls\.key: .*proxy\.key: no private key in PEM"),
        ("readable", r"proxy\.tls\.key: .*proxy\.key: other users may use it .*allowed: 0600"),
        ("gone", r"proxy\.tls\.key: .*proxy\.key: No such file"),
    ],
)
async def test_a_bad_file_is_named_and_changes_nothing(
    build: ProxyClusterBuilder, ca: Authority, served: Pair, damage: str, cause: str
) -> None:
    """At a reload the old certificate stays in use; at the start nothing is bound."""
    system = await build(proxy={"tls": served.section()}, pairs=1)
    damages: dict[str, Callable[[], object]] = {
        "expired": lambda: served.replace(ca.issue("expired", days=-1)),
        "other key": lambda: served.key.write_bytes(ca.issue("other").key.read_bytes()),
        "no pem": lambda: served.cert.write_bytes(b"nothing"),
        "no key": lambda: served.key.write_bytes(b"nothing"),
        "readable": lambda: served.key.chmod(0o640),
        "gone": served.key.unlink,
    }
    damages[damage]()

    with pytest.raises(ConfigError, match=cause):
        await system.proxy.reloads.reload()
    status = await status_for(system, ca.client())
    with pytest.raises(ConfigError, match=cause):
        await build(proxy={"tls": served.section()}, pairs=1, wait=False)

    assert status == 200


async def test_a_bad_file_is_logged_once(
    build: ProxyClusterBuilder,
    ca: Authority,
    served: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found by the proxy itself, and not again at each look; what is mended is taken."""
    monkeypatch.setattr(tls, "LOOK_INTERVAL_S", 0.02)
    system = await build(proxy={"tls": served.section()}, pairs=1)
    before = await serial_of(system, ca.client())
    good = ca.issue("renewed")
    served.cert.write_bytes(good.cert.read_bytes())

    def refusals() -> list[str]:
        return [
            str(vars(record)["cause"])
            for record in caplog.records
            if record.message == "certificate not loaded"
        ]

    async def is_refused() -> bool:
        return bool(refusals())

    async def is_new() -> bool:
        return bool(await serial_of(system, ca.client()) != before)

    await system.until(is_refused)
    still = await serial_of(system, ca.client())
    served.replace(good)
    await system.until(is_new)

    assert still == before
    assert len(refusals()) == 1
    assert "is not the key of" in refusals()[0]


async def test_a_key_with_a_password_does_not_stop_at_the_terminal(
    build: ProxyClusterBuilder, served: Pair, tmp_path: Path
) -> None:
    """OpenSSL would ask for it, and wait."""
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(served.key), "-aes128", "-passout", "pass:x"]
    made = await asyncio.create_subprocess_exec(
        *command, "-out", str(locked), stderr=asyncio.subprocess.DEVNULL
    )
    assert await made.wait() == 0
    locked.chmod(0o600)
    section = Pair(served.cert, locked).section()

    with pytest.raises(ConfigError, match=r"locked\.key: needs a password"):
        await build(proxy={"tls": section}, pairs=1, wait=False)


async def test_the_admin_port_has_a_certificate_of_its_own(
    build: ProxyClusterBuilder, ca: Authority, served: Pair
) -> None:
    """The clients' port stays as it is."""
    system = await build(proxy={"admin_tls": served.section()}, pairs=1, wait=False)
    url = f"https://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/state"

    async with system.http.get(url, ssl=ca.client()) as answer:
        state = await answer.json()
    async with system.http.get(f"{system.url}/healthz") as plain:
        status = plain.status

    assert state["instances"]
    assert status == 200


async def test_a_client_that_does_not_read_is_cut_off_as_in_plain(
    build: ProxyClusterBuilder, ca: Authority, served: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that TLS has buffered counts as unread too, and the stream does not look complete."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.3)
    system = await build(pairs=1, proxy={"tls": served.section()})
    system.script.event_padding = 100_000
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", system.proxy.port, limit=1024, ssl=ca.client()
    )
    body = msgspec.json.encode(BODY | {"stream": True, "max_tokens": 1000})
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    async def is_ended() -> bool:
        return system.instances["d0"].aborted == 1

    await system.until(is_ended)

    assert (await system.state())["streams"] == []
    rest = b""
    with contextlib.suppress(OSError):
        rest = await reader.read()
    assert not rest.endswith(b"0\r\n\r\n")
    writer.transport.abort()


async def test_a_client_that_leaves_ends_its_stream(
    build: ProxyClusterBuilder, ca: Authority, served: Pair
) -> None:
    """Also without the closing words of TLS."""
    system = await build(pairs=1, proxy={"tls": served.section()})
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    _, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port, ssl=ca.client())
    body = msgspec.json.encode(BODY | {"stream": True})
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    await system.until_streams_hold(2)

    writer.transport.abort()

    async def is_ended() -> bool:
        return system.instances["d0"].aborted == 1

    await system.until(is_ended)


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_launcher_reads_an_admin_port_over_tls(
    build: ProxyClusterBuilder, ca: Authority, served: Pair, mutual: bool
) -> None:
    """It trusts that very certificate, so that none of its own is needed."""
    section = served.section(ca.cert if mutual else None)
    system = await build(proxy={"admin_tls": section}, pairs=1, wait=False)
    settings = ProxySettings.model_validate(
        {"admin_tls": section, "admin_port": system.proxy.admin_port}
    )

    def not_spawned() -> NoReturn:
        raise AssertionError

    process = ProxyProcess(settings, not_spawned, str)
    state = await asyncio.to_thread(process.admin.state)

    assert state["instances"]
