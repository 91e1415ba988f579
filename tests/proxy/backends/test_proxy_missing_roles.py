"""Requests while no instance of a role is up."""

import json
from typing import Any

import pytest

from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids, ids_of
from kvrs_testkit.vllm_cluster import LONG, PROMPT, TOKENS, Builder, Vllms
from tests.proxy.conftest import ProxyClusterBuilder

AT_ONCE = {"recovery": {"role_wait_s": 0.0}}


async def without_prefill(vllms: Builder, **sections: Any) -> Vllms:
    system = await vllms(**sections)
    await system.servers["p0"].kill()
    await system.until_health(p0="down")
    return system


async def ready(system: ProxyCluster) -> tuple[int, str]:
    async with system.http.get(f"{system.url}/readyz") as answer:
        return answer.status, (await answer.text()).strip()


async def refusal(system: ProxyCluster) -> tuple[int, str, int]:
    """Status, message and Retry-After of a new request."""
    asked = {"prompt": PROMPT, "max_tokens": TOKENS}
    async with system.http.post(f"{system.url}/v1/completions", json=asked) as answer:
        error = json.loads(await answer.read())["error"]
        return answer.status, error["message"], int(answer.headers["Retry-After"])


@pytest.mark.parametrize("prompt", [LONG, "hello there"])
async def test_vllms_decode_instances_compute_prompts_without_a_prefill_instance(
    vllms: Builder, prompt: list[int] | str
) -> None:
    """In the one call that decodes: a hand-off to itself would keep blocks that nobody pulls."""
    system = await without_prefill(vllms)

    ids = await system.ids(prompt)

    (body,) = [body for name in ("d0", "d1") for body in system.servers[name].bodies]
    assert ids == expected_ids(ids_of(prompt), TOKENS)
    assert (body["prompt"], body["stream"]) == (prompt, True)
    assert "kv_transfer_params" not in body
    assert await ready(system) == (
        200,
        "ready: no prefill instance is up, decode instances compute prompts",
    )


async def test_a_chat_is_rendered_by_the_decode_instance_that_computes_its_prompt(
    vllms: Builder,
) -> None:
    """Its messages go there, and its prompt's ids come back for a recovery."""
    system = await without_prefill(vllms)
    messages = [{"role": "user", "content": "hello"}]

    status, answer = await system.complete(messages=messages, max_tokens=TOKENS, temperature=0)

    (body,) = [body for name in ("d0", "d1") for body in system.servers[name].bodies]
    assert status == 200
    assert json.loads(answer)["usage"]["completion_tokens"] == TOKENS
    assert (body["messages"], "kv_transfer_params" in body) == (messages, False)


@pytest.mark.parametrize("prompt", [PROMPT, "abc"])
async def test_a_stream_is_recomputed_at_another_decode_instance_without_a_prefill_instance(
    vllms: Builder, prompt: list[int] | str
) -> None:
    """At every token, with the ids of a prompt that came as text."""
    system = await without_prefill(vllms)
    system.shared.prompt_tokens = len(ids_of(prompt))

    for position in range(TOKENS):
        system.shared.faults = {position: Fault.RESET}
        assert await system.ids(prompt) == expected_ids(ids_of(prompt), TOKENS), position
        assert not system.shared.faults, "the fault happened"

    assert system.shared.violations == []


async def test_new_requests_go_to_a_prefill_instance_again_when_it_is_back(
    vllms: Builder,
) -> None:
    system = await without_prefill(vllms)
    await system.ids()

    await system.servers["p0"].restart()
    await system.until_health(p0="up")
    system.servers["p0"].bodies.clear()
    ids = await system.ids()

    assert ids == expected_ids(PROMPT, TOKENS)
    assert len(system.servers["p0"].bodies) == 1
    assert await ready(system) == (200, "ready")


async def test_without_a_decode_instance_the_refusal_says_so(vllms: Builder) -> None:
    """The refusal names the missing role, like /readyz, and why its instances are not up, without
    their addresses.
    """
    system = await vllms(policy=AT_ONCE)
    for name in ("d0", "d1"):
        await system.servers[name].kill()

    async def names_addresses() -> bool:
        rows = (await system.state())["instances"]
        causes = [row.get("reason", "") for row in rows if row["id"].startswith("d")]
        return all("(http://127.0.0.1" in each for each in causes)

    await system.until(names_addresses)

    status, message, retry_after_s = await refusal(system)

    refused, first, second = message.split("; ")
    assert (status, refused) == (503, "no decode instance came up within 0 s")
    assert first.startswith("d0: connection lost: ")
    assert second.startswith("d1: connection lost: ")
    assert "127.0.0.1" not in message
    assert retry_after_s >= 1
    assert await ready(system) == (503, "no decode instance is up")


@pytest.mark.parametrize(
    ("lost", "role"),
    [(("p0", "p1"), "prefill "), (("p0", "p1", "d0", "d1"), "")],
    ids=["without prefill", "without any instance no role is named"],
)
async def test_other_engines_refuse_and_say_what_is_missing(
    build: ProxyClusterBuilder, lost: tuple[str, ...], role: str
) -> None:
    """They get their prompts' KV from prefill instances."""
    system = await build(pairs=2, policy=AT_ONCE)
    for name in lost:
        await system.instances[name].kill()
    await system.until_health(**dict.fromkeys(lost, "down"))

    status, message, retry_after_s = await refusal(system)

    refused, *causes = message.split("; ")
    assert (status, refused) == (503, f"no {role}instance came up within 0 s")
    assert sorted(each.split(":")[0] for each in causes) == sorted(lost)
    assert retry_after_s >= 1
    assert await ready(system) == (503, f"no {role}instance is up")
