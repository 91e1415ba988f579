"""Small HTTP requests from the network of the calling thread."""

import http.client
from contextlib import closing
from urllib.parse import urlsplit

from kvrs.protocol.secrets import ScopedKey
from kvrs_testkit.ports import ProvenConnection


def get(url: str, key: ScopedKey) -> bytes:
    """Raises OSError: no answer, or another status than 200."""
    with closing(ProvenConnection(url, key, timeout_s=5)) as connection:
        try:
            connection.request("GET", urlsplit(url).path)
            answer = connection.getresponse()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from None
        if answer.status != 200:
            raise OSError(f"HTTP {answer.status}")
        return answer.read()
