"""Client of a proxy's admin port."""

import ssl
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Self
from urllib.parse import quote, urlsplit

import msgspec

from kvrs.config.file import ADMIN_ENV_NAME, Config, read_admin_tokens
from kvrs.config.security import TlsSettings
from kvrs.config.settings import netloc
from kvrs.errors import ConfigError, KvrsError
from kvrs.net.origins import has_origin
from kvrs.net.tls import pinned_client
from kvrs.protocol.instance import ExitReport

_TIMEOUT_S = 10.0
_SHOWN_BYTES = 200
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the address to connect to


class AdminError(KvrsError):
    """The admin port or an instance did not answer as expected; the message names the URL.

    `is_taken`: False if nothing listens at the port. `status`: the HTTP status of the answer; None:
    there was no HTTP answer.
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
            ConfigError: `url` is no HTTP URL.
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
        """Read the proxy's state, `/kvrs/v1/state`.

        Raises:
            AdminError: there is no answer, or it is not that of a kvrs proxy.
        """
        return self.read("state", "instances", "streams", "recoveries")

    def overview(self) -> Any:
        """Read the page's overview of the cluster, `/kvrs/v1/overview`.

        Raises:
            AdminError: as `state`.
        """
        return self.read("overview", "instances", "streams", "incidents", "policy")

    def reload(self) -> None:
        """Tell the proxy to reload its configuration file.

        Raises:
            AdminError: there is no answer, or it refuses.
        """
        self._ask("POST", "/kvrs/v1/reload", _TIMEOUT_S)

    def accept(self, instance: str) -> None:
        """Let the model and the weights of an instance be the right ones, at the proxy and its
        peers.

        Raises:
            AdminError: there is no answer, or it refuses.
        """
        self._ask("POST", f"/kvrs/v1/accept/{quote(instance, safe='')}", _TIMEOUT_S)

    def note_exit(self, instance: str, report: ExitReport) -> None:
        """Report how a process of an instance ended.

        Raises:
            AdminError: there is no answer, or it refuses.
        """
        path = f"/kvrs/v1/exits/{quote(instance, safe='')}"
        self._ask("POST", path, _TIMEOUT_S, msgspec.json.encode(report))

    def read(self, what: str, *keys: str) -> Any:
        """Read the JSON object at `/kvrs/v1/WHAT`, which must have these keys.

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
        """Return the body of the 200 answer to a GET.

        Raises:
            AdminError: there is no answer, or it has another status.
        """
        return self._ask("GET", path, timeout_s)

    def _ask(self, method: str, path: str, timeout_s: float, body: bytes | None = None) -> bytes:
        url = self.url + path
        with closing(self._connect(url, timeout_s)) as connection:
            try:
                connection.request(method, self._path + path, body, headers=self._headers)
                response = connection.getresponse()
                body = response.read()
            # The error may say that the server requires a client certificate.
            except ssl.SSLError as error:
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
