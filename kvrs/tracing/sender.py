"""Sends the spans of a proxy to a collector, by OTLP over HTTP, on the proxy's event loop."""

import asyncio
import gzip
import logging
import ssl
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import aiohttp

from kvrs import __version__
from kvrs.errors import ConfigError
from kvrs.tracing.otlp import SpanSource, encode_request, encode_span
from kvrs.tracing.settings import TraceSettings

log = logging.getLogger(__name__)

_AT_ONCE = 16  # Spans that are encoded before the loop does other work.
_LAST_S = 2.0  # For what is left when the proxy ends.
_PAUSE_S = 1.0  # Before a batch is sent again, twice as long each time.
_AGAIN = (429, 502, 503, 504)  # OTLP specification, "Retryable Response Codes".
_CONTENT = {"Content-Type": "application/x-protobuf", "User-Agent": f"kvrs/{__version__}"}


class SpanSender:
    """Holds spans until there is a batch of them, or for so long as the settings say."""

    def __init__(self, settings: TraceSettings) -> None:
        """Raises ConfigError: a file of the settings cannot be read."""
        self._settings = settings
        self._ssl = _ssl_context(settings)
        self._held: deque[SpanSource] = deque()
        self._dropped = 0
        self._is_full = asyncio.Event()  # A batch is.
        self._session: aiohttp.ClientSession | None = None

    def add(self, span: SpanSource) -> None:
        """Send it later; it is dropped where too many wait, of which the log has the number."""
        held, settings = self._held, self._settings
        if len(held) >= settings.most_spans:
            self._dropped += 1
            return
        held.append(span)
        if len(held) >= settings.batch_spans:
            self._is_full.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            least = self._settings.batch_spans
            try:
                async with asyncio.timeout(self._settings.delay_s):
                    await self._is_full.wait()
            except TimeoutError:
                least = 1
            self._is_full.clear()
            await self._send_batches(least)

    async def close(self) -> None:
        """Send what is left, for a moment at most. `run` has ended before."""
        try:
            async with asyncio.timeout(_LAST_S):
                await self._send_batches(1)
        except TimeoutError:
            log.warning("spans dropped", extra={"count": len(self._held), "cause": "the end"})
        if self._session is not None:
            await self._session.close()

    async def _send_batches(self, least: int) -> None:
        """While there are so many spans. Those of a batch are held until it is sent."""
        held = self._held
        while len(held) >= least:
            size = min(len(held), self._settings.batch_spans)
            encoded: list[bytes] = []
            for number, span in enumerate(list(islice(held, size))):
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                encoded.append(encode_span(span.span()))
            await self._send(encoded)
            for _ in range(size):
                held.popleft()
        if self._dropped:
            extra = {"count": self._dropped, "cause": "too many wait to be sent"}
            log.warning("spans dropped", extra=extra)
            self._dropped = 0

    async def _send(self, encoded: Sequence[bytes]) -> None:
        settings = self._settings
        body = encode_request(settings.resource, "kvrs", __version__, encoded)
        headers = _CONTENT | dict(settings.headers)
        if settings.is_packed:
            body = await asyncio.to_thread(gzip.compress, body, 6)
            headers["Content-Encoding"] = "gzip"
        cause = "no answer"
        try:
            async with asyncio.timeout(settings.timeout_s):
                pause_s = _PAUSE_S
                while (fault := await self._post(body, headers)) is not None:
                    cause, may_repeat = fault
                    if not may_repeat:
                        break
                    await asyncio.sleep(pause_s)
                    pause_s *= 2
                else:
                    return
        except TimeoutError:
            pass
        log.warning("spans dropped", extra={"count": len(encoded), "cause": cause})

    async def _post(self, body: bytes, headers: dict[str, str]) -> tuple[str, bool] | None:
        """Why it was not taken, and whether it may be sent again."""
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=True)
        try:
            async with self._session.post(
                self._settings.url, data=body, headers=headers, ssl=self._ssl
            ) as answer:
                await answer.read()
                if answer.status < 300:
                    return None
                return f"HTTP {answer.status}", answer.status in _AGAIN
        except aiohttp.ClientError as error:
            return str(error) or type(error).__name__, True


def _ssl_context(settings: TraceSettings) -> ssl.SSLContext | bool:
    """True: that of the system. Raises ConfigError."""
    files = settings.ca_file, settings.certificate_file
    if not any(files):
        return True
    try:
        for each in filter(None, (*files, settings.key_file)):
            Path(each).read_bytes()
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.certificate_file is not None:
            context.load_cert_chain(settings.certificate_file, settings.key_file)
    except OSError as error:  # Of `ssl` too.
        raise ConfigError([f"OTEL_EXPORTER_OTLP_*CERTIFICATE, *KEY: {error}"]) from None
    return context
