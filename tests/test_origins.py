"""Which requests a web page could have sent."""

import pytest

from kvrs.net.origins import has_origin, refusal

NAMES = {"10.0.0.7", "node-7.example"}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8001",
        "LOCALHOST:8001",
        "127.0.0.1:8001",
        "127.9.9.9",
        "[::1]:8001",
        "10.0.0.5:8001",
        "10.0.0.7",
        "Node-7.Example:8001",
    ],
)
def test_our_own_names_are_served(host: str) -> None:
    """Loopback, the address at which the request came in, and the names that are configured."""
    assert refusal("GET", {"Host": host}, "10.0.0.5", NAMES) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8001",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.6",
        "[::2]:8001",
        "[::1",
        "node-7.example.",
        "evil.example@localhost",
    ],
)
def test_any_other_name_is_refused(host: str) -> None:
    """A foreign name that resolves to this machine is how a web page reads what is served here."""
    refused = refusal("GET", {"Host": host} if host else {}, "10.0.0.5", NAMES)

    assert refused is not None
    assert refused[0] == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8001", None),
        ("http://localhost:3000", 403),
        ("https://evil.example", 403),
        ("null", 403),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_page_of_another_origin_is_refused(method: str, origin: str, status: int | None) -> None:
    """Another port of this machine is another origin."""
    refused = refusal(method, {"Host": "localhost:8001", "Origin": origin}, "127.0.0.1", set())

    assert (refused and refused[0]) == status


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", None),
        ("application/octet-stream", None),
        ("text/plain", 415),
        ("Text/Plain; charset=utf-8", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_types_that_a_page_may_send_unasked_are_refused(kind: str, status: int | None) -> None:
    """A browser asks before it sends any other type to another site."""
    refused = refusal("POST", {"Host": "localhost", "Content-Type": kind}, "127.0.0.1", set())

    assert (refused and refused[0]) == status


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:1/v1", "http://[::1]:8000", "HTTP://127.0.0.1:65535/"]
)
def test_an_origin_is_scheme_host_and_perhaps_a_port(url: str) -> None:
    assert has_origin(url)


@pytest.mark.parametrize(
    "url",
    ["", "h:80", "ftp://h", "http://", "http://:80", "http://h:65536", "http://h:x", "http://[::1"],
)
def test_a_url_to_which_nothing_can_be_sent_has_no_origin(url: str) -> None:
    """Also where urllib raises, at once or when the port is read."""
    assert not has_origin(url)
