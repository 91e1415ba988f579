"""Origins (scheme, host and port) of URLs, and refusal of requests that a web page makes in a
browser to an internal port: by DNS rebinding (a foreign name in `Host` that resolves to this
machine), or across sites.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

# Content types that a browser lets a page of another site send without asking the server
# (CORS-safelisted).
_SIMPLE_TYPES = {"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"}
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::[0-9]*)?")


def has_origin(url: str) -> bool:
    """Return whether the URL is http or https with a host, and without an invalid port."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # It is parsed when it is read.
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def refusal(
    method: str, headers: Mapping[str, str], local: str, names: Collection[str]
) -> tuple[int, str] | None:
    """Return status and message of the refusal if a web page may have made the request; None: the
    request is not refused.

    `local`: the address at which the request arrived; `names`: other names of this machine.
    """
    host = headers.get("Host", "")
    if not _is_ours(host, local, names):
        return 421, (
            "Host: another name; allowed: localhost, the address of this port, or a name in "
            "security.hosts"
        )
    if (origin := headers.get("Origin")) is not None and origin.partition("://")[2] != host:
        return 403, "Origin: another site; allowed: none, or that of this port"
    if method not in ("GET", "HEAD"):
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind in _SIMPLE_TYPES:
            return 415, "Content-Type: one of a form; allowed: 'application/json'"
    return None


def _is_ours(host: str, local: str, names: Collection[str]) -> bool:
    if (parts := _HOST.fullmatch(host)) is None:
        return False
    name = (parts[1] or parts[2]).lower()
    if name == "localhost" or name in names:
        return True
    try:
        address = ipaddress.ip_address(name)
        return address.is_loopback or address == ipaddress.ip_address(local.partition("%")[0])
    except ValueError:
        return False
