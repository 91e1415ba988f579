"""Fields that an endpoint does not know, as `proxy.unknown_fields` has them treated."""

import json
import logging
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kvrs.errors import RequestError, UnknownFieldsError
from kvrs.protocol.openai.responses import parse_response_request
from kvrs.proxy.api.bodies import UnknownFieldDropper
from kvrs.proxy.api.generate import read_generate
from kvrs.proxy.streams.metrics import AdmissionMetrics
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, read
from tests.proxy.conftest import ProxyClusterBuilder

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "completions": (lambda body: read(COMPLETIONS, body), {"prompt": "a", "max_tokens": 3}),
    "chat": (lambda body: read(CHAT, body), {"messages": [{"role": "user", "content": "a"}]}),
    "generate": (read_generate, {"prompt": "a"}),
    "responses": (parse_response_request, {"input": "a"}),
}


def dropper() -> UnknownFieldDropper:
    return UnknownFieldDropper(AdmissionMetrics(CollectorRegistry()))


def counted(one: UnknownFieldDropper) -> float:
    (family,) = one._metrics.dropped_fields.collect()
    return next(each.value for each in family.samples if each.name.endswith("_total"))


@pytest.mark.parametrize("case", CASES)
def test_all_unknown_fields_are_named_and_dropped_at_once(case: str) -> None:
    """The rest of the body is read as if they were absent."""
    parse, known = CASES[case]
    body = msgspec.json.encode(known | {"mystery": {"deep": [1]}, "other": 2})
    drops = dropper()

    with pytest.raises(UnknownFieldsError) as refusal:
        parse(body)
    dropped = drops.read(parse, body)

    assert {*refusal.value.names} == {"mystery", "other"}
    assert type(dropped) is type(parse(msgspec.json.encode(known)))
    assert counted(drops) == 2


def test_known_fields_are_refused_as_ever() -> None:
    """Only a field without a meaning here is dropped: one that would change the output is not."""
    drops = dropper()
    body = msgspec.json.encode({"prompt": "a", "mystery": 1, "priority": 7})
    parse = CASES["completions"][0]

    with pytest.raises(RequestError) as refusal:
        drops.read(parse, body)

    assert refusal.value.param == "priority"
    assert counted(drops) == 0


def test_each_name_is_logged_once_and_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A client with a name of its own in every request does not fill the log."""
    drops, parse = dropper(), CASES["completions"][0]

    with caplog.at_level(logging.WARNING):
        for number in [0, 0, *range(1, 100)]:
            drops.read(parse, msgspec.json.encode({"prompt": "a", f"x{number}": 1}))

    assert len(caplog.records) == 64
    assert counted(drops) == 101


@pytest.mark.network
async def test_a_proxy_drops_what_it_is_told_to_drop(build: ProxyClusterBuilder) -> None:
    """At streams and at endpoints beside them; by default both are refused by name."""
    strict = await build(pairs=1)
    tolerant = await build(pairs=1, proxy={"unknown_fields": "drop"})
    fields = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0, "mystery": 1}

    refused, _ = await strict.complete(**fields)
    status, body = await tolerant.complete(**fields)
    async with tolerant.http.post(
        f"{tolerant.url}/tokenize", json={"prompt": "a", "mystery": 1}
    ) as answer:
        passed = json.loads(await answer.read())["error"]

    assert refused == 400
    assert status == 200, body
    assert "mystery" not in tolerant.instances["d0"].bodies[-1]
    assert "no tokenizer" in passed["message"]
