"""Experts of an instance and copies of them, as operators see them."""

import msgspec

from kvrs.protocol.instance import ExpertReport
from tests.proxy.conftest import ProxyClusterBuilder

SHOWN = {
    "kvrs_instance_expert_skew": 1.75,
    "kvrs_instance_expert_copies": 12,
    "kvrs_expert_rebalances_total": 3,
}


async def test_skew_copies_and_changes_of_copies_are_shown_as_long_as_the_instance_is_up(
    build: ProxyClusterBuilder,
) -> None:
    """In the state, the overview of the page, and metrics; other instances have no such series."""
    system = await build()
    d0 = system.instances["d0"]
    d0.experts = ExpertReport(8, 12, 1.75, [40, 30], 3, 1 << 20, "no room")

    async def is_shown() -> bool:
        return (await row_of_d0("state"))["experts"] is not None

    async def row_of_d0(page: str) -> dict[str, object]:
        url = f"http://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/{page}"
        async with system.http.get(url) as answer:
            rows = (await answer.json())["instances"]
        found: dict[str, object] = next(row for row in rows if row["id"] == "d0")
        return found

    await system.until(is_shown)
    experts = (await row_of_d0("state"))["experts"]
    assert experts == msgspec.to_builtins(d0.experts)
    facts = (await row_of_d0("overview"))["facts"]
    assert isinstance(facts, dict)
    assert (facts["skew"], facts["copies"]) == ("1.75", "12")
    assert {name: await system.count(name, worker="d0") for name in SHOWN} == SHOWN
    assert 'kvrs_instance_expert_skew{role="decode",worker="d1"}' not in await system.metrics()

    await d0.kill()
    await system.until_health(d0="down")
    assert "kvrs_instance_expert_skew{" not in await system.metrics()
    assert "kvrs_instance_expert_copies{" not in await system.metrics()
    assert await system.count("kvrs_expert_rebalances_total", worker="d0") == 3
