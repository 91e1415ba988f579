"""`/ui` and the overview that it shows."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvrs.cli.incidents import incidents
from kvrs.core.event_log import LogEntry, read
from kvrs.core.incidents import Incidents, sentence
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Estimate, Option
from kvrs.ids import InstanceId, StreamId
from kvrs.proxy.api.rows import ATTEMPTS, LINKS, STREAMS, Counts, History, overview
from tests.browser import BROWSER, browsing
from tests.proxy.api.test_state_rows import a_row, down
from tests.proxy.conftest import ProxyClusterBuilder

MAX_PAGE_BYTES = 100_000
POLICY = {"policy": "auto"}
ESTIMATES = tuple(Estimate(each, InstanceId("d0"), 0.1) for each in Option)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="not installed: chromium")
# What the page shows: the class of each part's health by its name, and rows of recoveries.
HEALTH = """Object.fromEntries([...document.querySelectorAll(".part > span:first-child")].map(
    each => [each.firstChild.data.trim(), each.lastChild.className]))"""
LABELS = """[...document.querySelectorAll(".grid > .card > .dim:first-child")].map(
    each => each.textContent)"""
EVENTS = """[...document.querySelectorAll(".event .text")].map(each => each.textContent)"""
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


def seen(
    state: dict[str, Any],
    incidents: Incidents | None = None,
    history: History | None = None,
) -> dict[str, Any]:
    return overview(state, POLICY, incidents or Incidents(100), history or History())


def a_state(streams: int = 0, links: int = 0) -> dict[str, Any]:
    up = {"starts": 3, "node": "n0"}
    lost = {
        "id": "d1",
        "node": "n1",
        "reason": "connection refused",
        "prefix_hits": None,
        "starts": 1,
    }
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
    }


def test_the_overview_counts_streams_and_what_can_be_restored() -> None:
    """From where, and why the others cannot."""
    view = seen(a_state(streams=5))

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
        "started": "3 times",
        "accepted": "6 of 10",
    }
    assert (lost["health"], lost["reason"]) == ("down", "connection refused")
    assert view["agents"][0]["facts"] == {"checkpoints": "4", "held": "3 MB"}


def test_the_overview_tells_an_instance_that_is_started_again() -> None:
    """With its partner, and not that nothing listens there."""
    starting = a_state()["instances"][1] | {"state": "assist", "ready_in_s": 7.4}
    shown = "it is being started again, drafts for d0, its model is there in 7 s"

    rows = seen(
        a_state()
        | {
            "instances": [
                starting | {"paired_with": "d0"},
                starting | {"paired_with": None, "skipped": "draft: too large"},
            ]
        }
    )["instances"]

    assert [row["health"] for row in rows] == ["assist"] * 2
    assert [row["facts"].get("drafts by") for row in rows] == ["d0", None]
    assert rows[0]["reason"] == shown
    assert rows[1]["reason"] == shown.replace("drafts for d0, ", "") + ", draft: too large"


def test_the_overview_tells_an_instance_without_some_ranks_and_one_that_drains() -> None:
    short = a_row() | {"node": "n0", "state": "degraded", "degree": 1, "full_degree": 2}

    view = seen(a_state() | {"instances": [short, short | {"draining": True}]})

    assert [row["health"] for row in view["instances"]] == ["degraded", "draining"]
    assert {row["facts"]["ranks"] for row in view["instances"]} == {"1 of 2"}


def test_the_overview_has_the_cause_for_which_a_stream_was_given_up() -> None:
    """Also of a stream that was decided again before."""
    book, stream, d0 = Incidents(100), StreamId("A"), InstanceId("d0")
    recovered = act.Recovered(stream, 2, Option.MIGRATE, 0.1, ESTIMATES, "killed", d0)
    for at_s, event, actions in (
        (1.0, ev.InstanceLost(d0, 1, "killed", {stream: 3}), [recovered]),
        (2.0, ev.SlotDenied(stream, 2, InstanceId("d1"), 0.1), []),
        (31.0, ev.TimerFired(), [act.GiveUp(stream, act.Reason.NO_INSTANCE, "none came up", 1.0)]),
    ):
        book.note(at_s, at_s, event, actions)

    ((row,),) = (each["streams"] for each in seen(a_state(), book)["incidents"])

    shown = [(each["outcome"], each["failed"]) for each in row["attempts"]]
    assert shown == [("tried again", "no slot at d1"), ("lost", "none came up")]


def test_the_overview_is_bounded() -> None:
    """Whatever the number of streams and incidents, and for 15 minutes; the newest first, with the
    decisions of their streams.
    """
    book, history = Incidents(100), History()
    for number in range(200):
        streams = [StreamId(f"{number}-{each}") for each in range(20)]
        lost = ev.InstanceLost(InstanceId(f"d{number}"), 1, "killed", dict.fromkeys(streams, 3))
        decided = [
            act.Recovered(each, 2, Option.MIGRATE, 0.1, ESTIMATES, "killed", lost.instance)
            for each in streams
        ]
        book.note(float(number), float(number), lost, [])
        book.note(float(number), float(number), ev.TimerFired(), decided)
    for number in range(1000):
        history.sample(Counts(number, 0, 0.0, 0, 0), 5000, 0.123456, 5.0 * number, 1.8e9)

    view = seen(a_state(streams=5000, links=4032), book, history)

    rows = [each["streams"] for each in view["incidents"]]
    assert [len(each) for each in rows[:4]] == [20, 20, 10, 0]
    assert sum(map(len, rows)) == STREAMS
    assert view["incidents"][0]["sentence"].startswith("d199 died: killed; 20 streams, ")
    assert (view["incidents"][3]["others"], view["fates"]["running"]) == (20, 4000)
    assert len(view["links"]) == LINKS
    assert {len(values) for values in view["history"].values()} == {180}
    assert len(json.dumps(view)) < MAX_PAGE_BYTES


def test_the_guide_names_how_many_streams_the_page_has_rows_of() -> None:
    """An older event loses its rows to newer ones; the page then says where they are."""
    guide = " ".join(Path("docs/guide/state.md").read_text().split())

    assert f"rows of {STREAMS} streams together, with the last {ATTEMPTS} attempts" in guide


def test_a_sample_has_what_happened_since_the_one_before() -> None:
    """None where nothing did; an instance that restarts counts its prompts from 0 again."""
    history = History()

    history.sample(Counts(100, 2, 1.0, 1000, 500), 3, None, 10.0, 1e9)
    history.sample(Counts(350, 4, 2.5, 1200, 550), 4, 0.2, 15.0, 1e9 + 5)
    history.sample(Counts(350, 4, 2.5, 1300, 0), 0, None, 20.0, 1e9 + 10)

    history.sample(Counts(400, 5, 9.5, 1300, 0), 1, 0.1, 25.0, 1e9 + 15, ttfts_s=[0.1, 0.3])

    assert history.columns() == {
        "at_s": [1e9 + 5, 1e9 + 10, 1e9 + 15],
        "tokens_per_s": [50.0, 0.0, 10.0],
        "ttft_s": [0.75, None, 0.2],
        "streams": [4, 0, 1],
        "pause_s": [0.2, None, 0.1],
        "hit_share": [0.25, None, None],
    }


@pytest.mark.network
async def test_the_page_needs_no_token_and_holds_no_data(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """`/` leads to it. It loads nothing from elsewhere; what it shows needs the token."""
    token = tmp_path / "token"
    token.write_text("only for the tests: a token\n")
    token.chmod(0o600)
    system = await build(pairs=1, wait=False, security={"admin_token_file": str(token)})
    url = f"http://127.0.0.1:{system.proxy.admin_port}"

    async with system.http.get(f"{url}/") as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        led = [(each.status, each.headers["Location"]) for each in answer.history]
    async with system.http.get(f"{url}/kvrs/v1/overview") as answer:
        refused = answer.status
    headers = {"Authorization": "Bearer only for the tests: a token"}
    async with system.http.get(f"{url}/kvrs/v1/overview", headers=headers) as answer:
        view = await answer.json()

    assert led == [(307, "/ui")]
    assert refused == 401
    assert len(page.encode()) < MAX_PAGE_BYTES
    assert not re.search(r"https?://|@import|\bsrc=|<link", page)
    assert "default-src 'none'" in policy
    assert "innerHTML" not in page
    assert {row["id"] for row in view["instances"]} == {"p0", "d0"}
    assert view["policy"]["policy"] == "auto"


@pytest.mark.network
async def test_the_page_and_the_log_tell_a_death_in_the_same_words(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """At the same time, with the pause that the client saw."""
    log = tmp_path / "events.jsonl"
    system = await build(pairs=2, proxy={"event_log": str(log)})
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = asyncio.create_task(
        system.complete(prompt=[5, 6, 7], max_tokens=6, temperature=0, stream=True)
    )
    await system.until_streams_hold(3)
    (stream,) = (await system.state())["streams"]
    await system.instances[stream["decode"]].kill()
    system.script.gate.set()
    await asked
    url = f"http://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/overview"
    async with system.http.get(url) as answer:
        (shown,) = (await answer.json())["incidents"]
    (recovery,) = (await system.state())["recoveries"]
    await system.proxy.close()

    records = read(log.read_text().splitlines())
    (told,) = incidents(each for each in records if isinstance(each, LogEntry))
    assert (shown["time"], shown["sentence"]) == (str(told.at), sentence(told))
    assert (shown["subject"], shown["is_loss"]) == (stream["decode"], True)
    assert f"1 stream, back; pause {recovery['gap_s']:.2f} s; still down" in shown["sentence"]
    (row,) = shown["streams"]
    (attempt,) = row["attempts"]
    assert attempt["outcome"] == row["fate"] == "back"
    for key in ("predicted_s", "low_s", "high_s"):
        assert attempt[key] == recovery[key]
    assert attempt["low_s"] is not None
    (made,) = told.victims[row["stream"]].decisions
    assert (attempt["off"], attempt["interval_factor"]) == (made.off, made.interval_factor)


@pytest.mark.network
@pytest.mark.process
@needs_browser
async def test_an_open_page_shows_a_kill_with_its_next_looks(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """It looks once a second, so a kill shows within two; that the stream is saved follows, without
    an error of the console.
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
        await page.until(f"({EVENTS}).some(each => each.includes('1 stream, back'))")
        said = await page.evaluate(EVENTS)
        saved = await page.evaluate("document.querySelector('#numbers b').textContent")
        errors = page.errors

    assert before == dict.fromkeys(("p0", "d0", "p1", "d1"), "up")
    assert looks_after - looks <= 2
    assert status == 200
    assert len(said) == 1
    assert re.fullmatch(rf"{victim} died: .*; 1 stream, back; pause \d.* s; still down", said[0])
    assert saved == "1 of 1"
    assert errors == []


@pytest.mark.network
@pytest.mark.process
@needs_browser
async def test_an_event_with_many_streams_leaves_the_nodes_in_sight(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Which instance is down stands there: the rows scroll by themselves."""
    system = await build(pairs=1)
    attempt = {"way": "w", "cause": "c", "failed": "", "outcome": "back", "options": []}
    stream = {"stream": "s", "fate": "back", "pause_s": 1.0, "attempts": [attempt]}
    many = json.dumps({"streams": [stream] * 50, "others": 0})
    url = f"http://127.0.0.1:{system.proxy.admin_port}/ui"
    async with browsing(url, tmp_path) as page:
        await page.size(1280, 960)
        await page.until("document.getElementById('status')?.textContent === 'live'")
        height = await page.evaluate(
            f"document.body.appendChild(table({many})).getBoundingClientRect().height"
        )

    assert height <= 500


@pytest.mark.network
@pytest.mark.process
@needs_browser
async def test_the_row_of_a_lost_stream_ends_with_the_cause(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """An attempt that another followed has it where one points at it."""
    system = await build(pairs=1)
    attempt = {"way": "w", "cause": "c", "outcome": "tried again", "failed": "full", "options": []}
    last = attempt | {"outcome": "lost", "failed": "none came up"}
    lost = {"stream": "s", "fate": "lost", "pause_s": None, "attempts": [attempt, last]}
    url = f"http://127.0.0.1:{system.proxy.admin_port}/ui"
    async with browsing(url, tmp_path) as page:
        await page.until("document.getElementById('status')?.textContent === 'live'")
        ends = await page.evaluate(
            f"row({json.dumps(lost)}).map(each => each.lastChild.textContent)"
        )

    assert ends == ["tried again", "lost: none came up"]


@pytest.mark.network
@pytest.mark.process
@needs_browser
async def test_a_row_has_the_predicted_interval_and_how_far_the_real_time_is_off(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Each option with its interval at that time; without one only the predicted time."""
    system = await build(pairs=1)
    cost = {"option": "migrate", "predicted_s": 0.04, "is_chosen": True}
    attempt = {"way": "w", "cause": "c", "outcome": "back", "failed": "", "options": [cost]}
    known = {"low_s": 0.024, "high_s": 0.066, "real_s": 0.061, "off": 1.525}
    none = dict.fromkeys((*known, "interval_factor"))
    attempts = [
        attempt | none | {"predicted_s": 0.04},
        attempt | known | {"predicted_s": 0.04, "interval_factor": 1.65},
    ]
    stream = {"stream": "s", "fate": "back", "pause_s": 0.241, "attempts": attempts}
    url = f"http://127.0.0.1:{system.proxy.admin_port}/ui"
    async with browsing(url, tmp_path) as page:
        await page.until("document.getElementById('status')?.textContent === 'live'")
        cells = await page.evaluate(
            f"row({json.dumps(stream)}).map(each => [...each.cells].map(one => one.textContent))"
        )

    assert cells[0][2:] == ["migrate\u00a00.040", "0.040 s", "", "", "", "back"]
    assert cells[1][2] == "migrate\u00a00.040\u00a0(0.024\u20130.066)"
    assert cells[1][3:] == ["0.024\u20130.066 s", "0.061 s", "\u00d71.52 longer", "0.24 s", "back"]


@pytest.mark.network
@pytest.mark.process
@needs_browser
async def test_the_page_fits_a_phone_both_schemes_and_a_screen_reader(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Nothing is cut off at 400 pixels; colours follow the user's; parts and tables have names, and
    no two figures have the same one.
    """
    system = await build(pairs=2)
    url = f"http://127.0.0.1:{system.proxy.admin_port}/ui"
    async with browsing(url, tmp_path) as page:
        await page.size(400, 800)
        await page.until("document.getElementById('status')?.textContent === 'live'")
        width = await page.evaluate("document.documentElement.scrollWidth")
        labels = await page.evaluate(LABELS)
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
    assert len(labels) == len({*labels}) >= 10
    assert all(
        each.endswith(", every\N{NO-BREAK SPACE}5\N{NO-BREAK SPACE}s") for each in labels[-5:]
    )
    assert colours[0] != colours[1]
    assert spoken["region"] == ["Streams", "Last 15 minutes", "Events", "Nodes"]
    assert len(spoken["table"]) == 1
    assert all(spoken["table"])
    assert len(spoken["status"]) == 1
    assert {"Events", "Nodes", "Links"} <= {*spoken["heading"]}
