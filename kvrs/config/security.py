"""Section `security` of the configuration: where secrets, keys and certificates lie."""

from pydantic import Field

from kvrs.config.settings import Settings
from kvrs.config.tls import PeerTlsSettings


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
