"""Section `security` of the configuration: where secrets, keys and certificates lie."""

from pydantic import Field

from kvrs.config.settings import Settings
from kvrs.config.tls import PeerTlsSettings


class SecuritySettings(Settings):
    secret_file: str | None = None
    """Mode 0600, a secret on each line: the first is used, all are accepted. null: the
    environment's KVRS_SECRET.
    """
    admin_token_file: str | None = None
    """Mode 0600, a token on each line, for the admin port. null: KVRS_ADMIN_TOKEN; without any the
    port asks for none.
    """
    hosts: list[str] = Field(default=[], max_length=256)
    """Names of this cluster's machines, beside localhost and addresses: the Host of requests to
    ports that are not for clients.
    """
    key_file: str | None = None
    """Mode 0600, a line for each tenant, with hashes of its API keys and its limits
    (docs/guide/security.md). null: KVRS_KEYS; where that is not set either, clients need no key.
    """
    tls: PeerTlsSettings | None = None
    """TLS for HTTP between processes of the cluster; both ends have a certificate of `client_ca`.
    null: plain.
    """
