"""Client of a proxy's admin port: it reads the proxy's state, and sends orders to instances and
agents.
"""

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from kvrs.config.file import ADMIN_ENV_NAME, Config, read_admin_tokens
from kvrs.config.settings import netloc
from kvrs.config.tls import TlsSettings
from kvrs.errors import ConfigError, KvrsError
from kvrs.net.origins import has_origin
from kvrs.net.proving import Address, ProvingConnector, UnprovenError, address_of
from kvrs.net.tls import Certificates, pinned_client
from kvrs.protocol.fault_orders import FaultRequest
from kvrs.protocol.instance import ExitReport
from kvrs.protocol.secrets import Scope, ScopedKey, scoped_key

_TIMEOUT_S = 10.0
_SHOWN_BYTES = 200
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where one is reached from here


class AdminError(KvrsError):
    """The admin port or an instance did not answer as expected; the message names the URL.

    `is_taken`: something listens at the port. `status`: the HTTP status; None: no HTTP answer.
    """

    def __init__(
        self,
        url: str,
        cause: str,
        allowed: str = "",
        *,
        is_taken: bool = True,
        status: int | None = None,
    ) -> None:
        super().__init__(f"{url}: {cause}{allowed and f'; allowed: {allowed}'}")
        self.cause = cause
        self.is_taken = is_taken
        self.status = status


class AdminClient:
    """Client of a proxy's admin port with a new connection per call; calls block."""

    def __init__(
        self, url: str, token: bytes | None = None, tls: TlsSettings | None = None
    ) -> None:
        """`tls`: the port's own files, for an https:// URL; None: trust the CAs of the system, or
        of SSL_CERT_FILE.

        Raises:
            ConfigError: not an HTTP URL.
        """
        self.url = url.rstrip("/")
        if not has_origin(self.url):
            raise ConfigError(
                f"URL of an admin port: got {url!r}; allowed: http://HOST:PORT, or https://"
            )
        parts = urlsplit(self.url)
        self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path
        self._is_secure, self._tls = parts.scheme == "https", tls
        self._headers = {} if token is None else {"Authorization": b"Bearer " + token}

    @classmethod
    def of(cls, config: Config, environ: Mapping[str, str], url: str | None = None) -> Self:
        """Make a client with a configuration's admin token and certificate; without a URL, for the
        proxy with this configuration on this machine.

        Raises:
            ConfigError: the URL or the token cannot be used.
        """
        proxy, tls = config.proxy, config.proxy.admin_tls
        if url is None:
            if proxy.admin_port == 0:
                raise ConfigError(
                    "proxy.admin_port: got 0, any free port; allowed: the number of the port"
                )
            host = _WILDCARDS.get(proxy.admin_host, proxy.admin_host)
            url = f"http{'' if tls is None else 's'}://{netloc(host, proxy.admin_port)}"
        tokens = read_admin_tokens(config.security, environ)
        return cls(url, next(iter(tokens), None), tls)

    def state(self) -> Any:
        """`/kvrs/v1/state`.

        Raises:
            AdminError: there is no answer, or not from a kvrs proxy.
        """
        return self.read("state", "instances", "streams", "recoveries")

    def overview(self) -> Any:
        """`/kvrs/v1/overview`.

        Raises:
            AdminError: as `state`.
        """
        return self.read("overview", "instances", "streams", "recoveries", "policy")

    def reload(self) -> None:
        """Tell the proxy to reload its configuration file.

        Raises:
            AdminError: there is no answer, or it refuses.
        """
        self._ask("POST", "/kvrs/v1/reload", _TIMEOUT_S)

    def note_exit(self, instance: str, report: ExitReport) -> None:
        """Report how a process of an instance ended.

        Raises:
            AdminError: there is no answer, or it refuses.
        """
        path = f"/kvrs/v1/exits/{quote(instance, safe='')}"
        self._ask("POST", path, _TIMEOUT_S, msgspec.json.encode(report))

    def read(self, what: str, *keys: str) -> Any:
        """Read `/kvrs/v1/WHAT`, which must have these keys.

        Raises:
            AdminError: as `state`.
        """
        path = f"/kvrs/v1/{what}"
        body = self.get(path)
        try:
            found = msgspec.json.decode(body)
            for key in keys:
                found[key]
        except (msgspec.DecodeError, ValueError, RecursionError, TypeError, KeyError):
            cause = f"not the {what} of a kvrs proxy; it begins {body[:_SHOWN_BYTES]!r}"
            raise AdminError(self.url + path, cause, status=HTTPStatus.OK) from None
        return found

    def get(self, path: str, timeout_s: float = _TIMEOUT_S) -> bytes:
        """Get the body of a 200 answer.

        Raises:
            AdminError: no answer, or another status.
        """
        return self._ask("GET", path, timeout_s)

    def _ask(self, method: str, path: str, timeout_s: float, body: bytes | None = None) -> bytes:
        url = self.url + path
        with closing(self._connect(url, timeout_s)) as connection:
            try:
                connection.request(method, self._path + path, body, headers=self._headers)
                response = connection.getresponse()
                body = response.read()
            except ssl.SSLError as error:  # The server requires a client certificate.
                raise _tls_error(url, error) from None
            except (OSError, HTTPException) as error:
                # A server that requires a client certificate closes the connection without one.
                is_bare = self._is_secure and (self._tls is None or self._tls.client_ca is None)
                allowed = "a certificate of proxy.admin_tls.client_ca, if any" if is_bare else ""
                raise AdminError(url, f"no HTTP: {type(error).__name__}", allowed) from None
        status = response.status
        if status == HTTPStatus.UNAUTHORIZED:
            allowed = f"with the admin token, from {ADMIN_ENV_NAME} or the file of --config"
            raise AdminError(url, f"HTTP {status}", allowed, status=status)
        if status != HTTPStatus.OK:
            shown = body[:_SHOWN_BYTES].decode(errors="replace").strip()
            allowed = "the admin port of a kvrs proxy" if status == HTTPStatus.NOT_FOUND else ""
            cause = f"HTTP {status}{shown and f': {shown}'}"
            raise AdminError(url, cause, allowed, status=status)
        return body

    def _connect(self, url: str, timeout_s: float) -> HTTPConnection:
        connection = HTTPConnection(self._host, self._port, timeout=timeout_s)
        if self._is_secure:
            try:
                context = None if self._tls is None else pinned_client(self._tls)
            except OSError as error:  # OSError includes TLS errors.
                cause = f"proxy.admin_tls cannot be used: {error.strerror or error}"
                raise AdminError(url, cause, is_taken=False) from None
            connection = HTTPSConnection(self._host, self._port, timeout=timeout_s, context=context)
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise _tls_error(url, error) from None
        except OSError as error:
            cause = error.strerror or str(error) or type(error).__name__
            raise AdminError(url, cause, is_taken=False) from None
        return connection


def _tls_error(url: str, error: ssl.SSLError) -> AdminError:
    if isinstance(error, ssl.SSLCertVerificationError):
        allowed = "a certificate of a CA in SSL_CERT_FILE, or proxy.admin_tls in --config"
        return AdminError(url, f"TLS: {error.verify_message}", allowed)
    if error.reason == "WRONG_VERSION_NUMBER":
        return AdminError(url, "TLS: the answer is not TLS", "http:// without proxy.admin_tls")
    return AdminError(url, f"TLS: {error.reason or type(error).__name__}")


class AdminPort:
    """Asynchronous client of an admin port, which also sends orders to the instances and agents
    that the port names. An async context manager. Without the cluster's secret it only reads; `tls`
    is for the cluster's `security.tls`.
    """

    def __init__(
        self, client: AdminClient, secret: bytes | None = None, tls: Certificates | None = None
    ) -> None:
        self.client = client
        self.secret = secret
        self._tls = tls
        # Keys of the named instances and agents, by address.
        self._keys: dict[Address, ScopedKey] = {}

    async def __aenter__(self) -> Self:
        self._to_members = aiohttp.ClientSession(
            connector=ProvingConnector(self._keys, self._tls),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._to_members.close()

    async def state(self) -> Any:
        """`/kvrs/v1/state`.

        Raises:
            AdminError: there is no answer, or not from a kvrs proxy.
        """
        return await asyncio.to_thread(self.client.state)

    async def wait_all_up(
        self, timeout_s: float, look_again_s: float, *, tested: bool = False
    ) -> None:
        """Wait until every instance and agent is up; with `tested`, also until no self-test is
        left, which would send requests and KV of its own.

        Raises:
            AdminError: some are not up after `timeout_s`; the message names them.
        """
        down: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                while down := _down(state := await self.state()) or _in_tests(state, tested):
                    await asyncio.sleep(look_again_s)
        except TimeoutError:
            how = "up and tested" if tested else "up"
            cause = f"not {how} after {timeout_s:.0f} s: {', '.join(down)}"
            raise AdminError(self.client.url, cause) from None

    async def reset_caches(self) -> bool:
        """Empty every instance's prefix cache, so that each run starts cold; False without the
        secret.
        """
        if self.secret is None:
            return False
        for row in (await self.state())["instances"]:
            if row["health"] == "up":
                await self._post(row["id"], row["url"], "/reset_prefix_cache", b"")
        return True

    async def inject(self, name: str, url: str, fault: FaultRequest) -> None:
        """Let the named instance or agent inject a fault into what it sends."""
        await self._post(name, url, "/kvrs/v1/faults", msgspec.json.encode(fault))

    async def _post(self, name: str, base: str, path: str, body: bytes) -> None:
        url = base + path
        if self.secret is None:
            raise AdminError(
                url,
                "needs the cluster's secret",
                "--config, or the environment's KVRS_SECRET",
            )
        self._keys[address_of(base)] = scoped_key(self.secret, Scope.ADMIN, name)
        try:
            async with self._to_members.post(url, data=body) as answer:
                if answer.status != 200:
                    shown = (await answer.content.read(_SHOWN_BYTES)).decode(errors="replace")
                    raise AdminError(url, f"HTTP {answer.status}: {shown}", status=answer.status)
        except UnprovenError as error:
            cause = f"it did not prove that it is {name!r}: {error.cause}"
            raise AdminError(url, cause) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AdminError(url, str(error) or type(error).__name__) from None


def _down(state: Any) -> list[str]:
    return [
        row["id"]
        for row in [*state["instances"], *state.get("agents", ())]
        if row["health"] != "up"
    ]


def _in_tests(state: Any, tested: bool) -> list[str]:
    """Instances with an unfinished self-test, if `tested`; `self_test` is null at a proxy without
    self-tests.
    """
    tests = {row["id"]: row["self_test"] for row in state["instances"]} if tested else {}
    return [name for name, test in tests.items() if test is not None and not test["done"]]
