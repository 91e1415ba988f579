"""Server-sent events as a client reads them."""


def events_of(body: bytes | str) -> list[bytes]:
    """Return the events of a whole answer, and what stands behind the last; comments are left out.

    A proxy sends comments while a stream waits, so on a busy machine any answer may have some.
    """
    raw = body.encode() if isinstance(body, str) else body
    return [event for event in raw.split(b"\n\n") if not event.startswith(b":")]
