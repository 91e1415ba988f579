"""Certificate files of the ports for HTTP."""

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
