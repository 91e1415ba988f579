"""The observers of a proxy: a client that asks its admin port again and again, and a collector of
traces. Both run in threads of the experiment, on the core of the mocks.
"""

import gzip
import http.client
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from experiments.bench_proxy.engines import BenchError

# What Prometheus sends with a scrape.
SCRAPE = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
    "Accept-Encoding": "gzip",
}
_TIMEOUT_S = 10.0


class Asker:
    """GET of one path of an admin port, at a fixed rate, over one connection."""

    def __init__(self, port: int, path: str, per_s: float, headers: Mapping[str, str]) -> None:
        self.answers = 0
        self.fault = ""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        self._path = path
        self._pause_s = 1 / per_s
        self._headers = dict(headers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ask {path}")

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            due_s += self._pause_s
            try:
                self._connection.request("GET", self._path, headers=self._headers)
                answer = self._connection.getresponse()
                size = len(answer.read())
            except (OSError, http.client.HTTPException) as error:
                self.fault = repr(error)
                return
            if answer.status != 200 or not size:
                self.fault = f"status {answer.status}, {size} bytes"
                return
            self.answers += 1

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._connection.close()


@contextmanager
def asking(
    port: int, path: str, per_s: float, headers: Mapping[str, str] | None = None
) -> Iterator[Asker]:
    """Ask within the block.

    Raises:
        BenchError: an answer was not 200, or there was none.
    """
    asker = Asker(port, path, per_s, headers or {})
    asker.start()
    try:
        yield asker
    finally:
        asker.stop()
    if asker.fault:
        raise BenchError(f"{path}: {asker.fault}")


def get(port: int, path: str) -> bytes:
    """The body of one answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise BenchError(f"{path}: status {answer.status}")
    return body


class Collector:
    """Takes traces by OTLP over HTTP, and keeps them as they came."""

    def __init__(self) -> None:
        self._bodies: list[bytes] = []
        bodies = self._bodies

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_packed = self.headers.get("Content-Encoding") == "gzip"
                bodies.append(gzip.decompress(body) if is_packed else body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def span_names(self) -> list[str]:
        """The names of all spans that have arrived."""
        return [
            span.name
            for body in self._bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
