"""Section `security` of the configuration: where secrets, keys and certificates lie.

Certificate files of the ports for HTTP.
"""

from pydantic import Field

from kvrs.config.settings import Settings


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
