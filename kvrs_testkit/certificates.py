"""Certificates made with the openssl command."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

MISSING = None if shutil.which("openssl") else "not installed: openssl"
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path

    def section(self, client_ca: Path | None = None) -> dict[str, str | None]:
        """The pair as a section of the configuration."""
        ca = None if client_ca is None else str(client_ca)
        return {"cert": str(self.cert), "key": str(self.key), "client_ca": ca}

    def replace(self, other: "Pair") -> None:
        """Put another pair in these files, as a renewal does."""
        for here, there in ((self.cert, other.cert), (self.key, other.key)):
            new = here.with_suffix(".new")
            shutil.copy(there, new)
            new.rename(here)


class Authority:
    """A CA in a directory of its own."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory / name
        self._directory.mkdir()
        self.cert, self._key = self._directory / "ca.pem", self._directory / "ca.key"
        subject = ("-subj", f"/CN={name}", "-days", "2")
        _openssl("req", "-x509", *_EC, "-keyout", self._key, "-out", self.cert, *subject)

    def issue(self, name: str, days: int = 2) -> Pair:
        """For 127.0.0.1, and for clients; negative days: expired."""
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        asked, said = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        said.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\n")
        _openssl("req", *_EC, "-keyout", pair.key, "-out", asked, "-subj", f"/CN={name}")
        ca = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial")
        what = ("-days", str(days), "-extfile", said, "-out", pair.cert)
        _openssl("x509", "-req", "-in", asked, *ca, *what)
        pair.key.chmod(0o600)
        return pair

    def client(self, pair: Pair | None = None) -> ssl.SSLContext:
        """The context of a client that trusts this CA, and has a certificate or none."""
        context = ssl.create_default_context(cafile=str(self.cert))
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
