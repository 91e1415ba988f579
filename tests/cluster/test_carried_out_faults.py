"""Faults as they are carried out: on real processes, and by requests to instances that note them."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvrs.cluster.faults import FaultError, check_faults, strike, views
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.protocol.secrets import http_token
from kvrs.replay.admin import AdminPort
from kvrs.replay.faults import FaultSchedule, Phase, parse_faults
from kvrs.replay.passes import Scene

SECRET = b"a secret of this test, long enough"
LISTEN = "import socket,time; s=socket.create_server(('127.0.0.1',0)); print(s.getsockname()[1],flush=True); time.sleep(60)"
NOW: dict[str, Any] = {"at_s": 0}


class Victim:
    """A process that listens, as an instance does."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.pid = self.process.pid

    def state(self) -> str:
        """As the kernel has it: S sleeping, T stopped, Z dead."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def victim() -> Iterator[Victim]:
    with running() as found:
        yield found


@contextmanager
def running() -> Iterator[Victim]:
    found = Victim()
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
        assert found.process.stdout is not None
        found.process.stdout.close()


def row(name: str, node: str, url: str, pid: int, health: str = "up") -> dict[str, Any]:
    return {"id": name, "role": "prefill" if name[0] == "p" else "decode", "node": node, "url": url, "pid": pid, "health": health}


def state_of(*instances: dict[str, Any], streams: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"instances": list(instances), "streams": list(streams), "recoveries": []}


@asynccontextmanager
async def admin(state: Callable[[], dict[str, Any]]) -> AsyncIterator[AdminPort]:
    app = web.Application()

    async def show(request: web.Request) -> web.Response:
        return web.json_response(state())

    app.router.add_get("/kvrs/v1/state", show)
    async with serving(app) as url, AdminPort(url, SECRET) as port:
        yield port


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def instance(asked: list[Any], status: int = 200) -> AsyncIterator[str]:
    """Takes fault requests with the right token, and notes them."""
    app = web.Application()

    async def note(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {http_token(SECRET)}"
        asked.append(await request.json())
        return web.Response(status=status)

    app.router.add_post("/kvrs/v1/faults", note)
    async with serving(app) as url:
        yield url


def scene(port: AdminPort, faults: list[dict[str, Any]]) -> Scene:
    return Scene(port, FaultSchedule(parse_faults(faults), 0), time.monotonic(), lambda: 0, [])


def fault(what: str, **more: Any) -> dict[str, Any]:
    return {"when": NOW, "what": what, "whom": {"id": "d0"}} | more


async def hit(victim: Victim, *faults: dict[str, Any], host: str = "127.0.0.1", port: int | None = None) -> Scene:
    url = f"http://{host}:{port or victim.port}"
    async with admin(lambda: state_of(row("d0", "n0", url, victim.pid))) as admin_port:
        done = scene(admin_port, list(faults))
        await strike(done)
    return done


async def test_a_kill_kills_the_process_of_the_instance(victim: Victim) -> None:
    """And is noted with everything that a report wants to know of it."""
    done = await hit(victim, fault("kill"))

    assert victim.process.wait(5) == -9
    (noted,) = done.carried_out
    assert (noted["what"], noted["whom"], noted["instances"], noted["pid"]) == ("kill", "d0", ["d0"], victim.pid)
    assert not done.schedule.pending


async def test_a_stopped_process_is_stopped_and_runs_again_afterwards(victim: Victim) -> None:
    """`strike` ends when the last fault is over, not when the last one has begun."""
    task = asyncio.create_task(hit(victim, fault("stop", for_s=0.3)))
    while victim.state() != "T":
        await asyncio.sleep(0.005)
    await task

    assert victim.state() != "T"


async def test_a_slowed_process_is_stopped_again_and_again_and_runs_afterwards(victim: Victim) -> None:
    """A duty cycle of signals needs nothing of the engine."""
    task = asyncio.create_task(hit(victim, fault("slow", for_s=0.5, factor=2)))
    seen = []
    while not task.done():
        seen.append(victim.state())
        await asyncio.sleep(0.005)
    await task

    stops = sum(now == "T" != before for before, now in pairwise(["S", *seen]))
    assert stops >= 2
    assert victim.state() != "T"


async def test_a_run_that_ends_early_leaves_no_process_stopped(victim: Victim) -> None:
    """Ctrl-C, or a load that is over before its faults are."""
    task = asyncio.create_task(hit(victim, fault("stop", for_s=600)))
    while victim.state() != "T":
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert victim.state() != "T"


async def test_only_the_process_that_listens_there_is_ever_hit(victim: Victim) -> None:
    """A number alone may be anybody's: that of another machine, or of whoever got it after the instance died."""
    with running() as other, pytest.raises(FaultError, match="does not listen there"):
        await hit(victim, fault("kill"), port=other.port)

    assert victim.process.poll() is None


async def test_a_process_of_another_machine_is_refused(victim: Victim) -> None:
    """The address is not one of ours, whatever the process id says here."""
    with pytest.raises(FaultError, match="another machine"):
        await hit(victim, fault("kill"), host="192.0.2.1")

    assert victim.process.poll() is None


async def test_a_link_fault_is_asked_of_both_ends_and_taken_back() -> None:
    """Each end limits what it sends to the other's node; afterwards the next run must find the link whole."""
    asked: dict[str, list[Any]] = {"d0": [], "d1": [], "d2": []}
    link = {"whom": {"link": ["n0", "n1"]}}
    async with instance(asked["d0"]) as u0, instance(asked["d1"]) as u1, instance(asked["d2"]) as u2:
        rows = [row("d0", "n0", u0, 1), row("d1", "n1", u1, 2), row("d2", "n2", u2, 3)]
        async with admin(lambda: state_of(*rows)) as port:
            await strike(scene(port, [fault("link_cut", for_s=9, **link), fault("link_rate", bytes_per_s=5e6, for_s=9, **link)]))

    def hold(node: str, rate: float) -> dict[str, Any]:
        return {"type": "link", "node": node, "bytes_per_s": rate, "for_s": 9.0}

    assert asked["d0"] == [hold("n1", 0.0), hold("n1", 5e6), {"type": "none"}]
    assert asked["d1"] == [hold("n0", 0.0), hold("n0", 5e6), {"type": "none"}]
    assert asked["d2"] == []


async def test_damaged_pages_are_asked_of_the_instance_that_sends_them() -> None:
    """The engine flips the bit; nobody else can, after the checksum."""
    asked: list[Any] = []
    async with instance(asked) as url, admin(lambda: state_of(row("d0", "n0", url, 1))) as port:
        await strike(scene(port, [fault("corrupt_page", pages=3)]))

    assert asked[0] == {"type": "pages", "pages": 3}


async def test_faults_of_nobody_are_refused_before_any_load() -> None:
    """All at once, with who there is."""
    async with admin(
        lambda: state_of(row("d0", "n0", "http://127.0.0.1:1", 1), row("p0", "n1", "http://127.0.0.1:2", 2))
    ) as port:
        faults = [fault("kill", whom={"id": "d9"}), fault("link_cut", for_s=1, whom={"link": ["n0", "n9"]}), fault("kill")]

        with pytest.raises(ConfigError) as caught:
            await check_faults(parse_faults(faults), port)

    assert caught.value.faults == [
        "fault [0]: no 'd9' in the cluster; allowed: d0, p0",
        "fault [1]: no 'n9' in the cluster; allowed: n0, n1",
    ]


async def test_a_cluster_that_allows_no_faults_says_so_before_any_load() -> None:
    """The route is not there; the message names the key."""
    async with instance([], status=404) as url, admin(lambda: state_of(row("d0", "n0", url, 1))) as port:
        with pytest.raises(ConfigError, match=r"d0 takes no faults .*cluster\.allow_faults: true"):
            await check_faults(parse_faults([fault("corrupt_page", pages=1)]), port)

        await check_faults(parse_faults([fault("kill")]), port)


def test_a_stream_counts_where_it_works_and_its_phase_where_it_is_missed() -> None:
    """A prefill instance whose pages a decoding stream would need is its victim too."""

    def stream(stage: str, output: int) -> dict[str, Any]:
        return {"stage": stage, "prefill": "p0", "decode": "d0", "output_tokens": output, "max_tokens": 100}

    rows = [row("p0", "n0", "", 1), row("d0", "n0", "", 2), row("d1", "n1", "", 3, health="down")]
    streams = (stream("prefill", 0), stream("decode", 0), stream("decode", 50), stream("decode", 95), stream("waiting", 9))

    seen = views(state_of(*rows, streams=streams))

    assert set(seen) == {InstanceId("p0"), InstanceId("d0")}
    assert (seen[InstanceId("p0")].inflight, seen[InstanceId("d0")].inflight) == (1, 3)
    everything = {Phase.PREFILL: 1, Phase.HANDOFF: 1, Phase.DECODE: 1, Phase.NEAR_END: 1}
    assert seen[InstanceId("p0")].phases == seen[InstanceId("d0")].phases == everything
