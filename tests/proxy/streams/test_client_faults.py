"""Requests that an engine refuses for a fault of the request are rejected, and no failures of the
cluster.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.cli.incidents import incidents
from kvrs.core.event_log import LogEntry, read
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.streams.metrics import OUTCOMES_OF_REQUESTS
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

TEXT: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0}
IMAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
}


def of_vllm(message: str, param: str | None = None) -> bytes:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    return msgspec.json.encode({"error": error})


TOO_LONG = error_body("too long", param="prompt", code="context_length_exceeded")
TOO_LONG_OF_VLLM = of_vllm("This model's maximum context length is 10 tokens. However, ...")
OUT_OF_RANGE = error_body("token ids must be in [0, 511], got 900", param="prompt")
OUT_OF_RANGE_OF_VLLM = of_vllm("Token id 900 is out of vocabulary")
NO_IMAGE = error_body("only parts of type 'text' are supported", param="messages[0].content[0]")
NO_IMAGE_OF_VLLM = of_vllm("tiny is not a multimodal model")
UNKNOWN = error_body("no")

FINAL = {
    "too-long": (TEXT, TOO_LONG),
    "too-long-of-vllm": (TEXT, TOO_LONG_OF_VLLM),
    "out-of-range": (TEXT, OUT_OF_RANGE),
    "out-of-range-of-vllm": (TEXT, OUT_OF_RANGE_OF_VLLM),
    "image": (IMAGE, NO_IMAGE),
}
UNEXPLAINED = {"image-of-vllm": (IMAGE, NO_IMAGE_OF_VLLM), "unknown": (TEXT, UNKNOWN)}


def asked(system: ProxyCluster, stage: str) -> int:
    instances = system.instances.values()
    return sum(len(each.completions) for each in instances if each.id[0] == stage)


async def outcomes(system: ProxyCluster) -> dict[str, float]:
    counts = {
        name: await system.count("kvrs_requests_total", outcome=name)
        for name in OUTCOMES_OF_REQUESTS
    }
    return {name: count for name, count in counts.items() if count}


def lost_in(log: Path) -> list[str]:
    """Instances where attempts failed, as the log's incidents have them."""
    records = read(log.read_text().splitlines())
    happened = incidents(each for each in records if isinstance(each, LogEntry))
    return [loss.instance for each in happened for loss in each.losses]


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        *(("p", name) for name in (*FINAL, *UNEXPLAINED)),
        *(("d", name) for name in ("too-long", "out-of-range-of-vllm", "unknown")),
    ],
)
async def test_a_client_s_error_is_a_rejected_request_and_no_failure_of_the_cluster(
    build: ProxyClusterBuilder,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    stage: str,
) -> None:
    """Not in the outcomes of failures, attempts, recoveries and incidents, and no line of the log
    is a warning. Only a refusal that does not say why is repeated at one other instance.
    """
    caplog.set_level(logging.INFO)
    log = tmp_path / "events.jsonl"
    system = await build(pairs=3, proxy={"event_log": str(log)})
    request, body = (FINAL | UNEXPLAINED)[name]
    for instance in system.instances.values():
        if instance.id[0] == stage:
            instance.refusal = 400, body
    caplog.clear()

    answer = await system.ask(request)

    status, told = answer[0], msgspec.json.decode(answer[1])["error"]
    said = msgspec.json.decode(body)["error"]
    assert (status, told["message"]) == (400, said["message"])
    assert told["type"] == "invalid_request_error"
    assert await outcomes(system) == {"rejected": 1}
    assert await system.count("kvrs_attempts_failed_total") == 0
    assert await system.count("kvrs_recoveries_total") == 0
    assert (await system.state())["recoveries"] == []
    assert await system.count("kvrs_streams_given_up_total", reason="refused") == 1
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []
    (rejected,) = (vars(each) for each in caplog.records if each.message == "request rejected")
    kind = ", ".join(part for part in (told["type"], told["code"]) if part)
    assert rejected["cause"].endswith(f"refused with HTTP 400 ({kind})")
    assert said["message"] not in rejected["cause"]
    assert asked(system, stage) == (1 if name in FINAL else 2)
    await system.proxy.close()
    assert lost_in(log) == []


@pytest.mark.parametrize("stage", ["p", "d"])
async def test_what_another_instance_accepts_was_the_fault_of_the_first(
    build: ProxyClusterBuilder, tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    """The refusal is a failed attempt then, with an incident and a warning."""
    caplog.set_level(logging.INFO)
    log = tmp_path / "events.jsonl"
    system = await build(pairs=2, proxy={"event_log": str(log)})
    first = f"{stage}0"
    system.instances[first].refusal = 404, UNKNOWN

    answers = [(await system.ask(TEXT))[0] for _ in range(2)]

    assert answers == [200, 200]
    assert await outcomes(system) == {"complete": 2}
    assert await system.count("kvrs_attempts_failed_total", worker=first) == 1
    assert await system.count("kvrs_attempts_failed_total") == 1
    assert len((await system.state())["recoveries"]) == 1
    warned = [each.message for each in caplog.records if each.levelno > logging.INFO]
    assert warned == ["refused a request that is not at fault"]
    await system.proxy.close()
    assert lost_in(log) == [first]


@pytest.mark.parametrize("stage", ["p", "d"])
async def test_logits_that_are_no_numbers_are_computed_once_more(
    build: ProxyClusterBuilder, stage: str
) -> None:
    """Elsewhere, with a salt by which no page of before is found; then the client is told so, with
    the engine's code.
    """
    system = await build(pairs=3)
    for instance in system.instances.values():
        if instance.id[0] == stage:
            body = error_body("got nan", kind="server_error", code="not_a_number")
            instance.refusal = 500, body

    status, body = await system.ask(TEXT | {"cache_salt": "own"})

    said = msgspec.json.decode(body)["error"]
    assert (status, said["code"]) == (502, "retries")
    calls = [call for each in system.instances.values() for call in each.completions]
    salts = {(call.kvrs.attempt, call.cache_salt) for call in calls if call.kvrs is not None}
    (stream,) = {call.kvrs.stream for call in calls if call.kvrs is not None}
    assert salts == {(1, "own"), (2, f"own/{stream}/1")}
    assert said["message"] == (
        f"the stream's logits are no numbers, as {stage}0, {stage}1 found: "
        "HTTP 500 (server_error, not_a_number)"
    )
    assert asked(system, stage) == 2
    assert await outcomes(system) == {"failed": 1}


async def test_a_refusal_beside_a_failure_is_a_failure(build: ProxyClusterBuilder) -> None:
    """No instance has agreed with the first one, so the request is not known to be at fault."""
    system = await build(pairs=2, policy={"recovery": {"max_attempts": 3, "gather_s": 0.0}})
    system.instances["p0"].refusal = 404, UNKNOWN
    system.instances["p1"].refusal = 500, b"{}"

    status, _ = await system.ask(TEXT)

    rejected = await system.count("kvrs_requests_total", outcome="rejected")
    failed = await system.count("kvrs_attempts_failed_total")
    # A second refusal by p0 is not that of another instance.
    assert (status, rejected, failed) == (502, 0, 3)


async def test_a_refusal_of_a_continuation_is_no_fault_of_the_client(
    build: ProxyClusterBuilder,
) -> None:
    """The client's request was accepted: what an engine made of it since is none of its faults."""
    system = await build(pairs=2, policy={"recovery": {"max_attempts": 2}})
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    task = asyncio.create_task(system.ask(TEXT | {"stream": True}))
    await system.until_streams_hold(2)

    for instance in system.instances.values():
        instance.refusal = 400, TOO_LONG
    for name in ("d0", "d1"):
        system.instances[name].cut_streams()
    _, body = await task

    assert b"[DONE]" not in body
    assert b"retries" in body
    assert await outcomes(system) == {"failed": 1}
    assert await system.count("kvrs_attempts_failed_total") == 2


@pytest.mark.parametrize(
    ("status", "body", "is_final"),
    [
        *((400, body, True) for _, body in FINAL.values()),
        *((400, body, False) for _, body in UNEXPLAINED.values()),
        (404, error_body("no such model", param="model", code="model_not_found"), False),
        (404, TOO_LONG, False),
        (400, error_body("'p7' is not in the registry", param="kvrs.sources"), False),
        (400, error_body("'p7' is not in the registry", param="kv_transfer_params"), False),
        (400, error_body("not here", param="model"), False),
        (422, error_body("must not be empty", param="prompt"), True),
        (400, error_body("no"), False),
        (400, b'{"error":{}}', False),
        (400, b"[]", False),
    ],
)
def test_a_refusal_is_final_where_it_names_a_fault_of_the_request(
    status: int, body: bytes, *, is_final: bool
) -> None:
    """Its length or one of the client's own fields; not what the proxy set, or what an instance may
    lack.
    """
    assert RefusedError(status, body).is_final is is_final
