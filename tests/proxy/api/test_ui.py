"""`/ui` and the overview that it shows."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvrs.proxy.api.overview import LINKS, RECOVERIES, overview
from tests.browser import BROWSER, browsing
from tests.proxy.api.test_state_rows import a_row, down
from tests.proxy.conftest import ProxyClusterBuilder

MAX_PAGE_BYTES = 100_000
POLICY = {"policy": "auto"}
needs_browser = pytest.mark.skipif(BROWSER is None, reason="not installed: chromium")
# What the page shows: the class of each part's health by its name, and rows of recoveries.
HEALTH = """Object.fromEntries([...document.querySelectorAll(".part > span:first-child")].map(
    each => [each.firstChild.data.trim(), each.lastChild.className]))"""
OUTCOMES = """[...document.querySelectorAll("#recoveries tr")].map(
    each => each.lastChild.textContent)"""
LOOKS = """performance.getEntriesByType("resource").filter(
    each => each.name.endsWith("/kvrs/v1/overview")).length"""


def looks_until(condition: str) -> str:
    """How often the page has looked when it shows something, counted by itself: this process may be
    the slower one.
    """
    return f"""new Promise(done => {{
        const look = () => {condition} ? done({LOOKS}) : setTimeout(look, 10);
        look();
    }})"""


def a_state(streams: int = 0, recoveries: int = 0, links: int = 0) -> dict[str, Any]:
    up = {"epoch": 3, "node": "n0"}
    lost = {"id": "d1", "node": "n1", "reason": "connection refused", "prefix_hits": None}
    return {
        "proxies": [{"id": "proxy-0", "pid": 1, "peers": {}, "lacks_tokenizer": False}],
        "instances": [a_row() | up | {"streams": streams}, down(a_row()) | lost],
        "agents": [
            {
                "id": "agent-n0",
                "node": "n0",
                "health": "up",
                "checkpoints": 4,
                "held_bytes": 3e6,
                "reserved_bytes": 0,
                "regions": [],
            }
        ],
        "links": [{"source": "n0", "target": "n1", "bytes_per_s": 1e9, "measured": True}] * links,
        "slots": {"d0": {"held": 1, "waiting": 0, "max": 32}},
        "streams": [
            {
                "prefill": "p0",
                "decode": "d0",
                "stage": "decode",
                "exact": True,
                "protected": {"agent-n0": number % 2},
                "unprotected": None if number % 2 else "no agent was found for the stream",
            }
            for number in range(streams)
        ],
        "recoveries": [
            {
                "at_s": float(number),
                "stream": f"s{number}",
                "attempt": 2,
                "option": "migrate",
                "from": "d1",
                "to": "d0",
                "cause": "lost",
                "predicted_s": 0.1,
                "real_s": 0.2,
                "gap_s": 0.3,
                "outcome": "resumed",
                "regret_s": 0.0,
                "estimates": [{"option": "migrate", "total_s": 0.1, "queue_s": 0.0}],
            }
            for number in range(recoveries)
        ],
    }


def test_the_overview_counts_streams_and_what_can_be_restored() -> None:
    """From where, and why the others cannot."""
    view = overview(a_state(streams=5), POLICY)

    assert view["streams"] == {
        "open": 5,
        "by_stage": {"decode": 5},
        "inexact": 0,
        "restorable": {"streams": 2, "by_agent": {"agent-n0": 2}},
        "why_not": {"no agent was found for the stream": 3},
    }
    up, lost = view["instances"]
    assert up["facts"] == {
        "streams": "5",
        "queued": "2",
        "wait": "0.50 s",
        "skew": "1.50",
        "copies": "2",
        "cached": "60%",
        "epoch": "3",
        "accepted": "6 of 10",
    }
    assert (lost["health"], lost["reason"]) == ("down", "connection refused")
    assert view["agents"][0]["facts"] == {"checkpoints": "4", "held": "3 MB"}


def test_the_overview_tells_an_instance_that_is_started_again() -> None:
    """With its partner, and not that nothing listens there."""
    starting = a_state()["instances"][1] | {"state": "assist", "ready_in_s": 7.4}
    shown = "it is being started again, drafts for d0, its model is there in 7 s"

    rows = overview(
        a_state()
        | {
            "instances": [
                starting | {"paired_with": "d0"},
                starting | {"paired_with": None, "skipped": "draft: too large"},
            ]
        },
        POLICY,
    )["instances"]

    assert [row["health"] for row in rows] == ["assist"] * 2
    assert [row["facts"].get("drafts by") for row in rows] == ["d0", None]
    assert rows[0]["reason"] == shown
    assert rows[1]["reason"] == shown.replace("drafts for d0, ", "") + ", draft: too large"


def test_the_overview_tells_an_instance_without_some_ranks_and_one_that_drains() -> None:
    short = a_row() | {"node": "n0", "state": "degraded", "degree": 1, "full_degree": 2}

    view = overview(a_state() | {"instances": [short, short | {"draining": True}]}, POLICY)

    assert [row["health"] for row in view["instances"]] == ["degraded", "draining"]
    assert {row["facts"]["ranks"] for row in view["instances"]} == {"1 of 2"}


def test_the_overview_is_bounded() -> None:
    """Whatever the number of streams, the newest recoveries first."""
    view = overview(a_state(streams=5000, recoveries=1000, links=4032), POLICY)

    assert len(view["recoveries"]) == RECOVERIES
    assert view["recoveries"][0]["stream"] == "s999"
    assert len(view["links"]) == LINKS
    assert len(json.dumps(view)) < MAX_PAGE_BYTES


@pytest.mark.network
async def test_the_page_needs_no_token_and_holds_no_data(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """It loads nothing from elsewhere; what it shows needs the token."""
    token = tmp_path / "token"
    token.write_text("only for the tests: a token\n")
    token.chmod(0o600)
    system = await build(pairs=1, wait=False, security={"admin_token_file": str(token)})
    url = f"http://127.0.0.1:{system.proxy.admin_port}"

    async with system.http.get(f"{url}/ui") as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    async with system.http.get(f"{url}/kvrs/v1/overview") as answer:
        refused = answer.status
    headers = {"Authorization": "Bearer only for the tests: a token"}
    async with system.http.get(f"{url}/kvrs/v1/overview", headers=headers) as answer:
        view = await answer.json()

    assert refused == 401
    assert len(page.encode()) < MAX_PAGE_BYTES
    assert not re.search(r"https?://|@import|\bsrc=|<link", page)
    assert "default-src 'none'" in policy
    assert "innerHTML" not in page
    assert {row["id"] for row in view["instances"]} == {"p0", "d0"}
    assert view["policy"]["policy"] == "auto"


@pytest.mark.network
@pytest.mark.process
@needs_browser
async def test_an_open_page_shows_a_kill_with_its_next_looks(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """It looks once a second, so a kill shows within two; the recoveries follow, without an error
    of the console.
    """
    system = await build(pairs=2)
    url = f"http://127.0.0.1:{system.proxy.admin_port}/ui"
    async with browsing(url, tmp_path) as page:
        await page.until("document.getElementById('status')?.textContent === 'live'")
        before = await page.evaluate(HEALTH)
        system.script.gate, system.script.gate_at = asyncio.Event(), 3
        asked = asyncio.create_task(
            system.complete(prompt=[5, 6, 7], max_tokens=6, temperature=0, stream=True)
        )
        await system.until_streams_hold(3)
        (stream,) = (await system.state())["streams"]
        victim = stream["decode"]
        await system.instances[victim].kill()
        await system.until_health(**{victim: "down"})
        looks = await page.evaluate(LOOKS)
        # One was under way.
        looks_after = await page.evaluate(looks_until(f"({HEALTH})['{victim}'] === 'down'"))
        system.script.gate.set()
        status, _ = await asked
        await page.until(f"({OUTCOMES}).includes('resumed')")
        errors = page.errors

    assert before == dict.fromkeys(("p0", "d0", "p1", "d1"), "up")
    assert looks_after - looks <= 2
    assert status == 200
    assert errors == []


@pytest.mark.network
@pytest.mark.process
@needs_browser
async def test_the_page_fits_a_phone_both_schemes_and_a_screen_reader(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Nothing is cut off at 400 pixels; colours follow the user's; parts and tables have names."""
    system = await build(pairs=2)
    url = f"http://127.0.0.1:{system.proxy.admin_port}/ui"
    async with browsing(url, tmp_path) as page:
        await page.size(400, 800)
        await page.until("document.getElementById('status')?.textContent === 'live'")
        width = await page.evaluate("document.documentElement.scrollWidth")
        colours = []
        for scheme in ("light", "dark"):
            await page.scheme(scheme)
            colours.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]

    spoken: dict[str, list[str]] = {}
    for node in tree:
        if not node["ignored"]:
            name = node.get("name", {}).get("value", "")
            spoken.setdefault(node["role"]["value"], []).append(name)
    assert width <= 400
    assert colours[0] != colours[1]
    assert spoken["region"] == ["Streams", "Nodes"]
    assert len(spoken["table"]) == 2
    assert all(spoken["table"])
    assert len(spoken["status"]) == 1
    assert {"Nodes", "Recoveries", "Links"} <= {*spoken["heading"]}
