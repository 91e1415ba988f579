"""The client of the admin port before a server that is something else."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvrs.net.admin import AdminClient, AdminError

pytestmark = pytest.mark.network


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b'{"instances":"\xff"}', b'{"a":' + b"[" * 100_000],
    ids=["no JSON", "a list", "no UTF-8", "nested"],
)
def test_an_answer_of_another_server_is_named(body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with pytest.raises(AdminError, match="not the state of a kvrs proxy; it begins"):
                AdminClient(f"http://127.0.0.1:{server.server_port}").state()
        finally:
            server.shutdown()
            serving.join()
