"""Server-sent events as a client reads them."""

import re

# Lines from their first character; within JSON no line begins.
_COMMENTS = re.compile(rb"^:[^\n]*\n", re.MULTILINE)


def events_of(body: bytes | str) -> list[bytes]:
    """Return the events of a whole answer, and what stands behind the last; comments are left out.

    A proxy sends comments while a stream waits, so on a busy machine any answer may have some.
    """
    raw = body.encode() if isinstance(body, str) else body
    return without_comments(raw).split(b"\n\n")


def without_comments(raw: bytes) -> bytes:
    """Whole lines of a stream, without those that only keep its connection open."""
    return _COMMENTS.sub(b"", raw)
