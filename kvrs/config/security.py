"""Section `security` of the configuration: where secrets, keys and certificates lie.

Certificate files of the ports for HTTP.

Tenants of the clients' port: hashes of their API keys, and their limits on open streams.

They are a separate YAML document, `security.key_file` or the environment's KVRS_KEYS, which is
private and changes while the proxy runs: a section per tenant, under its name.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import yaml
from pydantic import Field, ValidationError

from kvrs.config.document import parse_yaml
from kvrs.config.settings import Settings, echoed, faults_of, read_private
from kvrs.errors import ConfigError


class TlsSettings(Settings):
    """PEM files, loaded again when they change."""

    cert: str = Field(min_length=1)
    """PEM file: the certificate, followed by those of intermediate CAs. Files are loaded again when
    they change.
    """
    key: str = Field(min_length=1)
    """PEM file, mode 0600."""
    client_ca: str | None = None
    """PEM file of CAs: clients must have a certificate of one of them. null: they need none."""


class PeerTlsSettings(TlsSettings):
    client_ca: str = Field(min_length=1)
    """PEM file: both ends of a connection must have a certificate of one of these CAs."""


class SecuritySettings(Settings):
    secret_file: str | None = None
    """File of mode 0600 with a secret on each line: the first is used, all are accepted. null:
    KVRS_SECRET of the environment.
    """
    admin_token_file: str | None = None
    """File of mode 0600 with a token on each line, for the admin port. null: KVRS_ADMIN_TOKEN;
    without either the port requires no token.
    """
    hosts: list[str] = Field(default=[], max_length=256)
    """Names of this cluster's machines, which ports that are not for clients accept as the Host of
    a request, beside localhost and addresses.
    """
    key_file: str | None = None
    """File of mode 0600 with a line for each tenant: hashes of its API keys, and its limits
    (docs/guide/security.md). null: KVRS_KEYS; without either, clients need no key.
    """
    tls: PeerTlsSettings | None = None
    """TLS for HTTP between processes of the cluster; both ends need a certificate of `client_ca`.
    null: plain HTTP.
    """


KEYS_ENV_NAME = "KVRS_KEYS"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_MAX_BYTES = 16 << 20
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HASHES = "the SHA-256 of a key, 64 hexadecimal digits"


class TenantSettings(Settings):
    """Keys and limit of one tenant. Each proxy counts streams itself; null: no limit."""

    # SHA-256 of each API key of the tenant, in hexadecimal (`_check_keys`). Two keys can be valid
    # at a time, so that clients can change from one to the other.
    keys: list[str] = Field(min_length=1, max_length=64)
    enabled: bool = True  # Requests of a disabled tenant get 403.
    # Most streams open at a time; each choice is a stream.
    streams: int | None = Field(default=None, ge=1)


def key_hash(key: bytes) -> bytes:
    """Hash an API key as it is stored. Keys are long and random, so a slow hash would add
    nothing.
    """
    return sha256(key).digest()


def check_name(name: object) -> None:
    """Check that a tenant's name is valid. Raises ConfigError: it is not."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"got {name!r:.80} as a tenant's name; allowed: {_NAME.pattern}")


def has_keys(security: SecuritySettings, environ: Mapping[str, str]) -> bool:
    """Return whether clients need an API key."""
    return security.key_file is not None or KEYS_ENV_NAME in environ


def read_tenants(
    security: SecuritySettings, environ: Mapping[str, str]
) -> dict[str, TenantSettings] | None:
    """Read the tenants by name; None: no keys are configured, so clients need none.

    Raises:
        ConfigError: an unreadable document, a document with faults, or one that other users can
            read.
    """
    if security.key_file is not None:
        source = f"security.key_file: {security.key_file}"
        text = read_private(security.key_file, source)
    elif KEYS_ENV_NAME in environ:
        source, text = f"environment variable {KEYS_ENV_NAME}", environ[KEYS_ENV_NAME].encode()
    else:
        return None
    try:
        return _parse(text)
    except ConfigError as error:
        raise ConfigError([f"{source}: {fault}" for fault in error.faults]) from None


def _parse(text: bytes) -> dict[str, TenantSettings]:
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"got {len(text)} bytes; allowed: at most {_MAX_BYTES}")
    try:
        document = parse_yaml(text.decode())
    except UnicodeDecodeError:
        raise ConfigError("not valid YAML: got bytes that are not UTF-8") from None
    except yaml.YAMLError as error:  # The parser's text shows the line, which may hold a key.
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = "" if mark is None else f" in line {mark.line + 1}"
        raise ConfigError(f"not valid YAML{place}") from None
    if not isinstance(document, dict) or not document:
        raise ConfigError("no tenant; allowed: a section for each tenant, under its name")
    tenants: dict[str, TenantSettings] = {}
    faults: list[str] = []
    owners: dict[str, str] = {}
    for name, fields in document.items():
        try:
            check_name(name)
            _check_keys(name, fields)
            tenants[name] = tenant = TenantSettings.model_validate(fields)
        except ConfigError as error:
            faults += error.faults
            continue
        except ValidationError as error:
            faults += faults_of(error, TenantSettings, name)
            continue
        for each in tenant.keys:
            if owners.setdefault(each, name) != name:
                faults.append(f"{name}.keys: one key is of {owners[each]} too; allowed: one tenant")
    if faults:
        raise ConfigError(faults)
    return tenants


def _check_keys(name: str, fields: Any) -> None:
    """Check the section of a tenant and its hashes. A fault shows no value: where a hash belongs, a
    key may stand by mistake.

    Raises:
        ConfigError: no section, or something that is not a hash.
    """
    if not isinstance(fields, dict):
        raise ConfigError(f"{name}: got {_size(fields)}; allowed: a section")
    keys = fields.get("keys", [])
    if not isinstance(keys, list):
        raise ConfigError(f"{name}.keys: got {_size(keys)}; allowed: a list, each {_HASHES}")
    faults = [
        f"{name}.keys.{place}: got {_size(key)}; allowed: {_HASHES}"
        for place, key in enumerate(keys)
        if not isinstance(key, str) or not _HASH.fullmatch(key)
    ]
    if faults:
        raise ConfigError(faults)


def _size(value: Any) -> str:
    return f"{len(value)} characters" if isinstance(value, str) else echoed(value)
