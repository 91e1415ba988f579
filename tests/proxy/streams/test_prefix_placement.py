"""Prompts of clients go where their prefix is, as operators see it."""

from typing import Any

from tests.proxy.conftest import ProxyClusterBuilder

LONG = "All the world's a stage, and all the men and women merely players. " * 60


async def test_a_chat_goes_on_where_its_first_turn_was_computed(
    build: ProxyClusterBuilder,
) -> None:
    """By the bytes of its requests; what instances had of them is in the state, the overview of the
    page, and metrics.
    """
    system = await build()
    prefill = [each for name, each in system.instances.items() if name.startswith("p")]
    for each in prefill:
        each.free_pages = 100_000

    async def is_reported() -> bool:
        rows = (await system.state())["instances"]
        return all(row["load"]["free_pages"] == 100_000 for row in rows if row["id"][0] == "p")

    await system.until(is_reported)
    messages = [{"role": "user", "content": LONG}]
    answer = {"role": "assistant", "content": "Aye."}

    async def prefilled_at(messages: list[dict[str, str]], cached_tokens: int) -> str:
        for each in prefill:
            each.cached_tokens = cached_tokens
        before = [len(each.completions) for each in prefill]
        status, _ = await system.complete(messages=messages, max_tokens=2)
        assert status == 200
        after = [len(each.completions) for each in prefill]
        (at,) = [n for n, pair in enumerate(zip(before, after, strict=True)) if pair[0] < pair[1]]
        return prefill[at].id

    first = await prefilled_at(messages, 0)
    system.instances[first].queue_delay_s = 0.01

    async def is_queued() -> bool:
        rows = (await system.state())["policy"]["instances"]
        return any(row["queue_s"] == 0.01 for row in rows if row["id"] == first)

    await system.until(is_queued)
    places = [
        await prefilled_at([*messages, answer, {"role": "user", "content": f"Turn {n}?"}], 3)
        for n in range(3)
    ]
    others = {await prefilled_at([{"role": "user", "content": f"{n}{LONG}"}], 0) for n in range(4)}

    assert places == [first] * 3
    assert others == {"p0", "p1"} - {first}
    hits = await _hits(system, first)
    assert hits["cached_tokens"] == 9
    assert hits["share"] == round(9 / hits["prompt_tokens"], 4)
    cached = await system.count("kvrs_worker_prompt_tokens_total", worker=first, source="cached")
    assert cached == 9


async def _hits(system: Any, name: str) -> Any:
    state = await system.state()
    return next(row for row in state["instances"] if row["id"] == name)["prefix_hits"]
