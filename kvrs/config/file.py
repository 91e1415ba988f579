"""The YAML configuration file as one frozen object, checked completely before anything starts.

Each section has a module of its own in this package, and `sections.py` composes them. This module
checks them, also across sections, and reports every mistake as one line with path, value and
allowed range.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from kvrs.config.across_sections import faults_across_sections
from kvrs.config.backup import AgentSettings
from kvrs.config.cluster import Backend, InstanceSettings
from kvrs.config.document import dump_yaml
from kvrs.config.overrides import override
from kvrs.config.presets import SystemPreset
from kvrs.config.sections import Sections
from kvrs.config.security import SecuritySettings
from kvrs.config.settings import faults_of, netloc, read_private
from kvrs.config.source import Source, lay_over, read_source
from kvrs.errors import ConfigError
from kvrs.protocol.secrets import MIN_SECRET_BYTES

ENV_NAME = "KVRS_SECRET"
ADMIN_ENV_NAME = "KVRS_ADMIN_TOKEN"


class Config(Sections):
    """The sections of a file, also checked across them."""

    def url_of(self, process: InstanceSettings | AgentSettings) -> str:
        """Return the URL of an instance's or agent's port for kvrs's own protocol."""
        if isinstance(process, AgentSettings):
            return self.inner_url(process.host, process.port)
        return self.inner_url(process.host, process.port)

    def inner_url(self, host: str, port: int) -> str:
        scheme = "http" if self.security.tls is None else "https"
        return f"{scheme}://{netloc(host, port)}"


def parse_config(document: Any) -> Config:
    """Check a parsed YAML document, and return it as a configuration.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        config = Config.model_validate({} if document is None else document)
    except ValidationError as error:
        raise ConfigError(faults_of(error, Config)) from None
    if faults := list(faults_across_sections(config)):
        raise ConfigError(faults)
    return config


def load_config(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    preset: SystemPreset | None = None,
) -> Config:
    """Read and check a YAML file; without a file, the defaults. The preset gives settings that the
    file lacks.

    With an environment, its variables replace `${NAME}` and override settings
    (docs/guide/configuration.md). Files written by kvrs are read without an environment.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds faults.
    """
    return checked(load_source(path, environ, preset))


def load_source(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    preset: SystemPreset | None = None,
    backend: Backend | None = None,
) -> Source:
    """Read a YAML file without checking it, with the place of each value. `backend` replaces the
    file's; a preset's drafts and ranks are for the embedded engine.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or variables name no setting.
    """
    source = Source("defaults") if path is None else read_source(path, environ)
    if preset is not None:
        below = read_source(preset.path)
        if (backend or source.value(("cluster", "backend"))) not in (None, Backend.EMBEDDED):
            for section in ("speculation", "cluster"):
                below.document.pop(section, None)
        lay_over(source, below)
    if environ is not None:
        override(source, environ, Config)
    return source


def checked(source: Source) -> Config:
    """Check a document, and return it as a configuration; each fault names the place of its value.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        return parse_config(source.document)
    except ConfigError as error:
        raise ConfigError([source.located(fault) for fault in error.faults]) from None


def dump_config(config: Config) -> str:
    """Write a configuration as YAML, which `parse_config` reads back as an equal object."""
    return dump_yaml(config.model_dump(mode="json"))


def config_digest(config: Config) -> str:
    """Return 16 hex digits that are the same for equal configurations, whatever their files look
    like.
    """
    return hashlib.sha256(msgspec.json.encode(config.model_dump(mode="json"))).hexdigest()[:16]


def read_secret(security: SecuritySettings, environ: Mapping[str, str]) -> bytes:
    """Read the first of the cluster's shared secrets, the only one that processes use for new
    messages; raises like `read_secrets`.
    """
    return read_secrets(security, environ)[0]


def read_secrets(security: SecuritySettings, environ: Mapping[str, str]) -> list[bytes]:
    """Read the cluster's shared secrets from `security.secret_file` or the environment's
    KVRS_SECRET, one per line.

    The first is used; the others are accepted too, so that a secret can be rotated.

    Raises:
        ConfigError: no secret, a secret that is too short, or a file that other users can read.
    """
    return _read_lines("a secret", "secret_file", security.secret_file, ENV_NAME, environ)


def read_admin_tokens(security: SecuritySettings, environ: Mapping[str, str]) -> list[bytes]:
    """Read the admin port's tokens, of which a client needs one, from `security.admin_token_file`
    or the environment's KVRS_ADMIN_TOKEN, one per line; empty: no token needed.

    Raises:
        ConfigError: a token that is too short, or a file that other users can read.
    """
    if security.admin_token_file is None and ADMIN_ENV_NAME not in environ:
        return []
    return _read_lines(
        "a token", "admin_token_file", security.admin_token_file, ADMIN_ENV_NAME, environ
    )


def _read_lines(
    what: str, key: str, path: str | None, variable: str, environ: Mapping[str, str]
) -> list[bytes]:
    if path is None:
        source = f"environment variable {variable}"
        if not (text := environ.get(variable, "").encode()):
            state = "is empty" if variable in environ else "is not set"
            raise ConfigError(
                f"{source} {state}; allowed: {what} of at least {MIN_SECRET_BYTES} bytes, such as "
                f"`openssl rand -hex 32` prints, or its file in security.{key}"
            )
    else:
        source = f"security.{key}: {path}"
        text = read_private(path, source)
    secrets = [line.strip() for line in text.strip().split(b"\n")]
    for secret in secrets:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{source}: {what} of {len(secret)} bytes; allowed: at least {MIN_SECRET_BYTES}"
            )
    return secrets
