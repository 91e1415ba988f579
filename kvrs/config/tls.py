"""Certificate files of the ports for HTTP."""

from pydantic import Field

from kvrs.config.settings import Settings


class TlsSettings(Settings):
    """PEM files, loaded again when they change."""

    cert: str = Field(min_length=1)  # The certificate, followed by those of intermediate CAs.
    key: str = Field(min_length=1)  # Mode 0600.
    # Those who connect must have a certificate of one of these CAs; none: they need not have any.
    client_ca: str | None = None


class PeerTlsSettings(TlsSettings):
    # Both ends of a connection must have a certificate of one of these CAs.
    client_ca: str = Field(min_length=1)
