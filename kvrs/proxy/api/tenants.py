"""Tenants of requests, by API key."""

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvrs.config.file import Config
from kvrs.config.security import TenantSettings, key_hash, read_tenants
from kvrs.core.books.tenants import GuessLimit, TenantMeter
from kvrs.errors import ConfigError, RequestError
from kvrs.net.routes import Request, retry_after
from kvrs.protocol.secrets import TenantSecret

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
_LONGEST_KEY_BYTES = 512
_KEY = "X-Api-Key"  # Header in which clients of Anthropic's API send their key.
# Paths served without an API key.
OPEN_PATHS = ("/healthz", "/readyz", "/health")


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant. Without API keys all requests belong to one tenant, without limit and secret, and
    only records of streams are kept apart, by the values of `Authorization` and `X-Api-Key`.
    """

    name: str = ""
    # Mark of the tenant's secret, by which records name the tenant; empty: no secret.
    mark: str = ""
    meter: TenantMeter | None = None
    secret: TenantSecret | None = None


class Tenants:
    """Tenants by API key. `ring`: the cluster's secrets, the current one first."""

    def __init__(
        self,
        config: Config,
        ring: Sequence[bytes],
        clock: Callable[[], float],
    ) -> None:
        """Raises ConfigError: the keys cannot be read."""
        self._config = config
        self._ring = ring
        self._clock = clock
        self._guesses = GuessLimit()
        # Tenant of every request, without API keys; None: API keys are in use.
        self.only: Tenant | None = Tenant()
        self._by_name: dict[str, Tenant] = {}
        self._by_hash: dict[bytes, Tenant] = {}
        # Tenants that are no longer in the file while streams of theirs are open, by name.
        self._former: dict[str, Tenant] = {}
        self._settings = read_tenants(config.security, os.environ)
        if self._settings is not None:
            self._apply(self._settings)

    def secret_of(self, request: Request, tenant: Tenant) -> TenantSecret:
        """Return the secret that makes the keys of a request's records of streams."""
        if tenant.secret is not None:
            return tenant.secret
        given = [*request.headers.getall("Authorization", ()), *request.headers.getall(_KEY, ())]
        owner = b"authorization\0" + ", ".join(given).encode("utf-8", "surrogateescape")
        return TenantSecret(self._ring, owner)

    def of(self, request: Request) -> Tenant:
        """Return the tenant of a request, by its key if keys are in use.

        Raises:
            RequestError: the key is missing or unknown, or its tenant is not enabled.
        """
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get(_KEY, "")
        given = key.strip().encode("utf-8", "surrogateescape")
        if not given or len(given) > _LONGEST_KEY_BYTES:
            raise self._refused(
                request, f"no API key; allowed: Authorization: Bearer KEY, or {_KEY}: KEY"
            )
        digest = key_hash(given)
        # The time that this look-up takes reveals nothing of a key: a client cannot steer hashes.
        tenant = self._by_hash.get(digest)
        if tenant is None:
            raise self._refused(request, "incorrect API key", "invalid_api_key")
        if tenant.meter is not None and not tenant.meter.limits.enabled:
            raise RequestError(
                "the tenant of this API key is not enabled",
                status=403,
                code="tenant_disabled",
                kind="permission_error",
            )
        return tenant

    def _refused(self, request: Request, message: str, code: str | None = None) -> RequestError:
        """Make the refusal of a request: 401, or 429 for addresses with many failures. A right key
        is still accepted from there, because others may share the address, and a key is too long to
        guess.
        """
        if wait_s := self._guesses.guess(_network(request.remote), self._clock()):
            return RequestError(
                "too many requests without a right API key from this address",
                status=429,
                code="rate_limit_exceeded",
                kind="requests",
                headers={"Retry-After": retry_after(wait_s)},
            )
        return RequestError(message, status=401, code=code, headers={"WWW-Authenticate": "Bearer"})

    def prepare(self, config: Config) -> Callable[[], None] | None:
        """Read the keys, and return a function that puts them in use while open streams go on.
        None: the keys are unchanged.

        Raises:
            ConfigError: the keys cannot be read.
        """
        settings = read_tenants(config.security, os.environ)
        if settings is None or settings == self._settings:
            return None
        return partial(self._apply, settings)

    async def run(self) -> None:
        """Follow the file of keys until cancelled. A changed file is read a moment later, when it
        is complete.
        """
        read = seen = self._file_version()
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            before, seen = seen, self._file_version()
            if seen != before or seen == read:
                continue
            read = seen
            try:
                apply = await asyncio.to_thread(self.prepare, self._config)
            except ConfigError as error:
                log.warning("keys not reloaded", extra={"cause": str(error)})
                continue
            if apply is not None:
                apply()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "tenant": name,
                "enabled": meter.limits.enabled,
                "open_streams": meter.open_streams,
                "refused": meter.refused,
            }
            for name, tenant in self._by_name.items()
            if (meter := tenant.meter) is not None
        ]

    def _apply(self, settings: dict[str, TenantSettings]) -> None:
        self._settings, self.only = settings, None
        by_name: dict[str, Tenant] = {}
        by_hash: dict[bytes, Tenant] = {}
        known = self._former | self._by_name
        for name, limits in settings.items():
            tenant = known.get(name)
            if tenant is None or tenant.meter is None:
                secret = TenantSecret(self._ring, b"tenant\0" + name.encode())
                tenant = Tenant(name, secret.mark, TenantMeter(limits), secret)
            else:
                tenant.meter.limits = limits
            by_name[name] = tenant
            by_hash |= dict.fromkeys(map(bytes.fromhex, limits.keys), tenant)
        # A tenant that comes back to the file finds its open streams counted.
        self._former = {
            name: tenant
            for name, tenant in known.items()
            if name not in by_name and tenant.meter is not None and tenant.meter.open_streams
        }
        self._by_name, self._by_hash = by_name, by_hash
        log.info("keys in use", extra={"tenants": len(by_name), "keys": len(by_hash)})

    def _file_version(self) -> tuple[int, int, int] | None:
        if self._config.security.key_file is None:
            return None
        try:
            found = Path(self._config.security.key_file).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _network(address: str | None) -> str:
    """Return the address; for IPv6 its /64 network, since a host has all addresses
    of the network.
    """
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if parsed.version == 4:
        return str(parsed)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
