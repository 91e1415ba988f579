"""Small HTTP calls from wherever the calling thread is."""

import urllib.request


def get(url: str, token: str | None = None) -> bytes:
    """Raises OSError: nobody answers, or with another status than 200."""
    request = urllib.request.Request(url, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        body: bytes = answer.read()
        return body
