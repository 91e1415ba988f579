"""Mutually exclusive options of `kvrs proxy`, and a proxy's secret."""

import secrets
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from kvrs.config.cluster import Backend
from kvrs.config.exposure import needs_secret
from kvrs.config.file import ENV_NAME, Config, read_secrets
from kvrs.config.origin import CommandLine
from kvrs.errors import ConfigError


def command_line(
    config: Path | None,
    prefill: list[str] | None,
    decode: list[str] | None,
    model: str | None,
    backend: str | None,
    of_proxy: Mapping[str, int | str | None],
) -> CommandLine | None:
    """Return the configuration that the command line gives in place of a file; None: a file is
    given.

    Raises:
        ConfigError: neither a file nor a server is given, or both.
    """
    given = {"--prefill": prefill, "--decode": decode, "--model": model, "--backend": backend}
    if config is not None:
        if faults := [
            f"{option}: got {value if isinstance(value, str) else ', '.join(value)} beside "
            f"--config {config}; allowed: one of them (the file names the servers and the model)"
            for option, value in given.items()
            if value
        ]:
            raise ConfigError(faults)
        return None
    if not (prefill or decode):
        raise ConfigError(
            "--decode: missing; allowed: URLs of servers, as --prefill http://a:8100 --decode "
            "http://b:8200 --decode http://c:8200, or --config FILE"
        )
    engine = Backend(backend or Backend.VLLM)
    return CommandLine(prefill or [], decode or [], model, engine, dict(of_proxy))


def secrets_of_proxy(config: Config, environ: MutableMapping[str, str]) -> list[bytes]:
    """Return the cluster's secrets. A proxy that shares no secret with another process makes its
    own, and passes it to its workers in `environ`.

    Raises:
        ConfigError: a shared secret is needed and missing, or a secret is not usable.
    """
    is_set = config.security.secret_file is not None or ENV_NAME in environ
    if not is_set and not needs_secret(config):
        environ[ENV_NAME] = secrets.token_hex(32)
    return read_secrets(config.security, environ)
