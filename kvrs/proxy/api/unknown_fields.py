"""Fields of bodies that an endpoint does not know, dropped (`proxy.unknown_fields: drop`)."""

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvrs.errors import UnknownFieldsError
from kvrs.proxy.streams.metrics import AdmissionMetrics

log = logging.getLogger(__name__)

_MOST_NAMED = 64  # Names come from clients: the log is not to grow with them.
_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])

Parsed = TypeVar("Parsed")


class UnknownFieldDropper:
    """Has bodies read without the fields that are not known, and logs each name once."""

    def __init__(self, metrics: AdmissionMetrics) -> None:
        self._metrics = metrics
        self._named: set[str] = set()

    def read(self, read: Callable[..., Parsed], body: bytes, **limits: int) -> Parsed:
        """Parse a body by `read`; only one with unknown fields is parsed twice.

        Raises:
            RequestError: it is wrong in another way.
        """
        try:
            return read(body, **limits)
        except UnknownFieldsError as error:
            self._note(error.names)
            unknown = {*error.names}
        fields = _FIELDS.decode(body)
        known = {name: value for name, value in fields.items() if name not in unknown}
        return read(msgspec.json.encode(known), **limits)

    def _note(self, names: tuple[str, ...]) -> None:
        self._metrics.dropped_fields.inc(len(names))
        for name in names:
            if name not in self._named and len(self._named) < _MOST_NAMED:
                self._named.add(name)
                log.warning("unknown field of requests is dropped", extra={"field": name[:80]})
