"""Fault injection on real processes, and by requests to instances that record them."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.net.admin import AdminClient, AdminError
from kvrs.net.http import answer
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_lab.cluster.fault_injection import (
    WATCH_INTERVAL_S,
    check_faults,
    inject_faults,
    members_of,
    unknown_victims,
    views,
)
from kvrs_lab.cluster.victims import FaultError, open_process
from kvrs_lab.faults.language import Phase, VictimRole, parse_faults
from kvrs_lab.faults.schedule import FaultSchedule
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.passes import Injection
from kvrs_testkit.ports import serving

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]

SECRET = b"a secret of this test, long enough"
LISTEN = (
    "import socket,time; s=socket.create_server(('127.0.0.1',0)); "
    "print(s.getsockname()[1],flush=True); time.sleep(600)"
)
NOW: dict[str, Any] = {"at_s": 0}


class Victim:
    """A process that listens, as an instance does."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.pid = self.process.pid

    def state(self) -> str:
        """The kernel's state: S sleeping, T stopped, Z dead."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def was_continued(self) -> bool:
        """True if it was stopped and continued since the last call: the kernel notes it."""
        return os.waitid(os.P_PID, self.pid, os.WCONTINUED | os.WNOHANG) is not None


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
    return {
        "id": name,
        "role": "prefill" if name[0] == "p" else "decode",
        "node": node,
        "url": url,
        "pid": pid,
        "health": health,
    }


def agent(node: str, url: str = "", pid: int = 1, checkpoints: int = 0) -> dict[str, Any]:
    return {
        "id": f"agent-{node}",
        "node": node,
        "url": url,
        "pid": pid,
        "health": "up",
        "checkpoints": checkpoints,
    }


def stream(name: str, stage: str = "decode", output_tokens: int = 0, **more: Any) -> dict[str, Any]:
    places = {"prefill": "p0", "decode": "d0"}
    return (
        {"id": name, "stage": stage, "output_tokens": output_tokens, "max_tokens": 100}
        | places
        | more
    )


def state_of(
    *instances: dict[str, Any],
    streams: tuple[dict[str, Any], ...] = (),
    agents: tuple[dict[str, Any], ...] = (),
    launcher_pid: int | None = 1,
) -> dict[str, Any]:
    return {
        "proxies": [{"id": "proxy-0", "launcher_pid": launcher_pid}],
        "instances": list(instances),
        "agents": list(agents),
        "streams": list(streams),
        "recoveries": [],
    }


@asynccontextmanager
async def admin(state: Callable[[], dict[str, Any]]) -> AsyncIterator[AdminPort]:
    routes = Routes()

    async def show(request: Request) -> Response:
        return answer(state())

    routes.add("GET", "/kvrs/v1/state", show)
    async with serving(routes) as url, AdminPort(AdminClient(url), SECRET) as port:
        yield port


@asynccontextmanager
async def instance(asked: list[Any], name: str = "d0", status: int = 200) -> AsyncIterator[str]:
    """Takes fault requests on proved connections, and notes them."""
    routes = Routes()

    async def note(request: Request) -> Response:
        asked.append(msgspec.json.decode(await request.read()))
        return Response(status)

    routes.add("POST", "/kvrs/v1/faults", note)
    async with serving(routes, [scoped_key(SECRET, Scope.ADMIN, name)]) as url:
        yield url


def injection(port: AdminPort, faults: list[dict[str, Any]]) -> Injection:
    return Injection(
        port, FaultSchedule(parse_faults(faults), 0, Random), time.monotonic(), lambda: 0, []
    )


def fault(what: str, **more: Any) -> dict[str, Any]:
    return {"when": NOW, "what": what, "whom": {"id": "d0"}} | more


async def hit(
    victim: Victim, *faults: dict[str, Any], host: str = "127.0.0.1", port: int | None = None
) -> Injection:
    url = f"http://{host}:{port or victim.port}"
    async with admin(lambda: state_of(row("d0", "n0", url, victim.pid))) as admin_port:
        done = injection(admin_port, list(faults))
        await inject_faults(done)
    return done


async def test_a_kill_kills_the_process_of_the_instance(victim: Victim) -> None:
    """And is recorded with all fields that a report needs."""
    done = await hit(victim, fault("kill"))

    assert victim.process.wait(60) == -9
    (noted,) = done.carried_out
    assert (noted["what"], noted["whom"], noted["instances"], noted["pid"]) == (
        "kill",
        "d0",
        ["d0"],
        victim.pid,
    )
    assert not done.schedule.pending


async def test_a_stopped_process_is_stopped_and_runs_again_afterwards(victim: Victim) -> None:
    """`inject_faults` ends when the last fault is over, not when the last one has begun."""
    await hit(victim, fault("stop", for_s=0.3))

    assert victim.was_continued()
    assert victim.state() != "T"


async def test_a_slowed_process_is_stopped_again_and_again_and_runs_afterwards(
    victim: Victim,
) -> None:
    """A duty cycle of signals needs nothing of the engine."""
    await hit(victim, fault("slow", for_s=0.2, factor=2))
    assert victim.was_continued()
    assert victim.state() != "T"

    task = asyncio.create_task(hit(victim, fault("slow", for_s=600, factor=2)))
    for _ in range(3):
        while not victim.was_continued():
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

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
    """A process id alone may belong to another machine, or to another process after the instance
    died.
    """
    with running() as other, pytest.raises(FaultError, match="does not listen there"):
        await hit(victim, fault("kill"), port=other.port)

    assert victim.process.poll() is None


@pytest.mark.parametrize("pid", [0, None])
def test_a_process_without_a_known_id_is_refused_by_name(pid: int | None) -> None:
    """An instance may lose its id in the state after the faults were checked."""
    with running() as other:
        url = f"http://127.0.0.1:{other.port}"

        with pytest.raises(FaultError) as refused:
            open_process(row("d0", "n0", url, 1) | {"pid": pid})

    says = f"instance d0 at {url}: its process id is {pid} (unknown); allowed: a known one"
    assert str(refused.value) == says


async def test_a_process_of_another_machine_is_refused(victim: Victim) -> None:
    """The address is not local, whatever process has this id here."""
    with pytest.raises(FaultError, match="another machine"):
        await hit(victim, fault("kill"), host="192.0.2.1")

    assert victim.process.poll() is None


def test_a_process_at_an_ipv6_address_is_of_this_machine() -> None:
    """The socket that tries the address is of its family."""
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 loopback on this machine")
    with listening:
        url = f"http://[::1]:{listening.getsockname()[1]}"

        handle = open_process(row("d0", "n0", url, os.getpid()))

    os.close(handle)


async def test_a_node_is_hit_with_its_agent() -> None:
    """Both are frozen and woken together; another node is not affected."""
    with running() as decode, running() as holder, running() as other:

        def state() -> dict[str, Any]:
            urls = [f"http://127.0.0.1:{one.port}" for one in (decode, other, holder)]
            instances = (
                row("d0", "n0", urls[0], decode.pid),
                row("d1", "n1", urls[1], other.pid),
            )
            return state_of(*instances, agents=(agent("n0", urls[2], holder.pid),))

        async with admin(state) as port:
            done = injection(port, [fault("stop", for_s=600, whom={"node": "n0"})])
            task = asyncio.create_task(inject_faults(done))
            while (decode.state(), holder.state()) != ("T", "T"):
                await asyncio.sleep(0.005)
            assert other.state() != "T"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        assert "T" not in (decode.state(), holder.state())
        assert done.carried_out[0]["instances"] == ["agent-n0", "d0"]


async def test_a_victim_that_died_of_another_fault_meanwhile_is_no_error(victim: Victim) -> None:
    """The state was read just before; the others of the group are hit all the same."""
    with running() as other:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        looks = 0

        def state() -> dict[str, Any]:
            nonlocal looks
            looks += 1
            health = "up" if looks == 1 else "down"
            urls = [f"http://127.0.0.1:{one.port}" for one in (other, victim)]
            return state_of(
                row("d0", "n0", urls[0], dead.pid, health), row("d1", "n0", urls[1], victim.pid)
            )

        async with admin(state) as port:
            done = injection(port, [fault("kill", whom={"node": "n0"})])
            await inject_faults(done)

        assert victim.process.wait(60) == -9
        assert other.process.poll() is None
    assert [(note["instances"], note["gone"]) for note in done.carried_out] == [
        (["d0", "d1"], ["d0"])
    ]


@pytest.mark.parametrize("what", ["kill", "lose_device"])
async def test_a_rank_that_died_of_another_fault_meanwhile_is_no_error(
    victim: Victim, what: str
) -> None:
    """Its instance lives and goes on without it. A rank that is still there, and cannot be hit, is
    an error.
    """
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    later: list[dict[str, Any]] = []
    async with instance([], status=400) as asked:
        # Signals want the process that listens, requests the port that answers.
        url, pid = (f"http://127.0.0.1:{victim.port}", victim.pid) if what == "kill" else (asked, 1)
        first = row("d0", "n0", url, pid) | {"ranks": [{"rank": 1, "pid": dead.pid}]}
        looks = 0

        def state() -> dict[str, Any]:
            nonlocal looks
            looks += 1
            return state_of(first if looks == 1 else first | {"ranks": later})

        async with admin(state) as port:
            faults = [fault(what, whom={"id": "d0", "rank": 1})]
            done = injection(port, faults)
            await inject_faults(done)
            later.append({"rank": 1, "pid": dead.pid})
            looks = 0
            with pytest.raises((FaultError, AdminError)):
                await inject_faults(injection(port, faults))

    assert [note["gone"] for note in done.carried_out] == [["d0"]]


NAMED = (
    "import sys,time; open('/proc/self/comm','w').write(sys.argv[1]); print(flush=True); "
    "time.sleep(600)"
)


@contextmanager
def host(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process with the name of a stage's host."""
    process = subprocess.Popen(
        [sys.executable, "-c", NAMED, name], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def in_host(stage: int, pid: int, donor: str | None = None) -> dict[str, Any]:
    return {"stage": stage, "host_pid": pid, "session": 1, "donor": donor}


@pytest.mark.parametrize(("donor", "name"), [(None, "d0-stage-1"), ("d1", "d1-stage-1")])
async def test_a_stage_is_hit_at_the_host_that_has_it(
    victim: Victim, donor: str | None, name: str
) -> None:
    """Its own, or that of the donor; never another process, and not the instance's own."""
    url = f"http://127.0.0.1:{victim.port}"
    faults = [fault("kill", whom={"id": "d0", "stage": 1})]
    with host(name) as right, host("d0-stage-0") as other:
        divided = row("d0", "n0", url, victim.pid)
        stages = [in_host(0, other.pid), in_host(1, right.pid, donor)]
        async with admin(lambda: state_of(divided | {"stages": stages})) as port:
            await check_faults(parse_faults(faults), port)
            done = injection(port, faults)
            await inject_faults(done)
        status = right.wait(60)
        wrong = [in_host(1, other.pid, donor)]
        async with admin(lambda: state_of(divided | {"stages": wrong, "state": "full"})) as port:
            with pytest.raises(FaultError, match=f"stage 1 of instance d0: {name}: .*another one"):
                await inject_faults(injection(port, faults))

        assert status == -9
        assert (other.poll(), victim.process.poll()) == (None, None)
    assert [note["stages"] for note in done.carried_out] == [{"d0": 1}]


@pytest.mark.parametrize(
    ("later", "is_gone"),
    [({"state": "reforming"}, True), ({"stages": [in_host(1, 1)]}, True), ({}, False)],
)
async def test_a_host_that_died_of_another_fault_meanwhile_is_no_error(
    victim: Victim, later: dict[str, Any], is_gone: bool
) -> None:
    """It is waited for, or another one has the stage. One that is said to be there is an error."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    first = row("d0", "n0", f"http://127.0.0.1:{victim.port}", victim.pid)
    first |= {"stages": [in_host(1, dead.pid)], "state": "full"}
    rows = [first | later, first]
    async with admin(lambda: state_of(rows.pop())) as port:
        done = injection(port, [fault("kill", whom={"id": "d0", "stage": 1})])
        if is_gone:
            await inject_faults(done)
        else:
            with pytest.raises(FaultError):
                await inject_faults(done)

    assert [note["gone"] for note in done.carried_out] == [["d0"]] * is_gone


async def test_a_stage_that_is_in_no_host_is_refused_before_any_load() -> None:
    """A stage in the instance's own process is hit with the instance."""
    own = in_host(0, 1) | {"session": None}
    rows = [row("d0", "n0", "", 1) | {"stages": [own, in_host(1, 2)]}, row("d1", "n0", "", 2)]
    async with admin(lambda: state_of(*rows)) as port:
        faults = [
            fault("kill", whom={"id": "d0", "stage": 0}),
            fault("kill", whom={"id": "d1", "stage": "random"}),
            fault("kill", whom={"id": "d0", "stage": "random"}),
        ]

        with pytest.raises(ConfigError) as caught:
            await check_faults(parse_faults(faults), port)

    assert caught.value.faults == [
        "fault [0]: no stage 0 of d0 in a host; allowed: 1",
        "fault [1]: no stage random of d1 in a host; allowed: none, none is in a host",
    ]


async def test_an_agent_is_asked_like_an_instance() -> None:
    """It sends pages, too: those of restores."""
    asked: list[Any] = []
    async with (
        instance(asked, "agent-n0") as url,
        admin(lambda: state_of(agents=(agent("n0", url),))) as port,
    ):
        await check_faults(
            parse_faults([fault("corrupt_page", pages=3, whom={"role": "agent"})]), port
        )
        await inject_until_the_end(
            injection(port, [fault("corrupt_page", pages=3, whom={"role": "agent"})])
        )

    assert asked == [{"type": "none"}, {"type": "pages", "pages": 3}, {"type": "none"}]


async def test_a_link_fault_is_asked_of_both_ends_and_taken_back() -> None:
    """Each end limits what it sends to the other's node; afterwards the next run must find the link
    whole.
    """
    asked: dict[str, list[Any]] = {"d0": [], "d1": [], "d2": []}
    link = {"whom": {"link": ["n0", "n1"]}}
    async with (
        instance(asked["d0"]) as u0,
        instance(asked["d1"], "d1") as u1,
        instance(asked["d2"], "d2") as u2,
    ):
        rows = [row("d0", "n0", u0, 1), row("d1", "n1", u1, 2), row("d2", "n2", u2, 3)]
        async with admin(lambda: state_of(*rows)) as port:
            started_s = time.monotonic()
            await inject_faults(
                injection(
                    port,
                    [
                        fault("link_cut", for_s=0.3, **link),
                        fault("link_rate", bytes_per_s=5e6, for_s=0.2, **link),
                    ],
                )
            )

    def holds(node: str) -> list[dict[str, Any]]:
        of_link = {"type": "link", "node": node}
        return [
            of_link | {"bytes_per_s": 0.0, "for_s": 0.3},
            of_link | {"bytes_per_s": 5e6, "for_s": 0.2},
        ]

    assert time.monotonic() - started_s >= 0.3, "it was taken back before it was over"
    assert asked["d0"] == [*holds("n1"), {"type": "none"}]
    assert asked["d1"] == [*holds("n0"), {"type": "none"}]
    assert asked["d2"] == []


async def inject_until_the_end(injection: Injection) -> None:
    """Inject all faults, then end them, as a run does when its load is over."""
    task = asyncio.create_task(inject_faults(injection))
    while injection.schedule.pending or not injection.carried_out:
        await asyncio.sleep(0.005)
    # Ending now would undo the fault before any page was sent.
    ended, _ = await asyncio.wait([task], timeout=10 * WATCH_INTERVAL_S)
    assert not ended
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_page_damage_is_requested_from_the_sending_instance() -> None:
    """The engine flips the bit, after the checksum. Pages not sent by the end of the run stay
    undamaged.
    """
    asked: list[Any] = []
    async with instance(asked) as url, admin(lambda: state_of(row("d0", "n0", url, 1))) as port:
        await inject_until_the_end(injection(port, [fault("corrupt_page", pages=3)]))

    assert asked == [{"type": "pages", "pages": 3}, {"type": "none"}]


async def test_faults_with_unknown_victims_are_refused_before_any_load() -> None:
    """All at once, with the known names."""
    async with admin(
        lambda: state_of(
            row("d0", "n0", "http://127.0.0.1:1", 1), row("p0", "n1", "http://127.0.0.1:2", 2)
        )
    ) as port:
        faults = [
            fault("kill", whom={"id": "d9"}),
            fault("link_cut", for_s=1, whom={"link": ["n0", "n9"]}),
        ]
        faults += [fault("kill", whom={"role": "agent"}), fault("kill")]

        with pytest.raises(ConfigError) as caught:
            await check_faults(parse_faults(faults), port)

    assert caught.value.faults == [
        "fault [0]: no 'd9' in the cluster; allowed: d0, p0",
        "fault [1]: no 'n9' in the cluster; allowed: n0, n1",
        "fault [2]: no 'agent' in the cluster; allowed: decode, prefill",
    ]


async def test_processes_that_the_laboratory_did_not_start_are_not_signalled() -> None:
    """The admin port may belong to a cluster in production. Faults that instances carry out
    themselves need the cluster's secret, which instances check.
    """
    asked: list[Any] = []
    async with instance(asked) as url:
        state = state_of(row("d0", "n0", url, 1), launcher_pid=None)
        async with admin(lambda: state) as port:
            faults = [fault("corrupt_page", pages=1), fault("kill", whom={"role": "decode"})]
            await check_faults(parse_faults(faults[:1]), port)

            with pytest.raises(ConfigError) as caught:
                await check_faults(parse_faults(faults), port)

    assert caught.value.faults == [
        "fault [1]: kill of decode: this proxy and its instances were not started by kvrs lab up; "
        "allowed: kill, stop and slow in a cluster of kvrs lab up"
    ]


async def test_a_victim_whose_process_is_unknown_is_refused_before_any_load() -> None:
    """Any victim that the schedule may choose later; stock engines tell no process id."""
    rows = [row("d0", "n0", "", 0), row("d1", "n1", "", 1), row("p0", "n1", "", 2)]
    async with admin(lambda: state_of(*rows)) as port:
        faults = [
            fault("kill", whom={"role": "decode"}),
            fault("stop", for_s=1, whom={"node": "n0"}),
            fault("kill", whom={"role": "prefill"}),
        ]

        with pytest.raises(ConfigError) as caught:
            await check_faults(parse_faults(faults), port)

    assert caught.value.faults == [
        "fault [0]: kill of decode: the process id of d0 is 0 (unknown); allowed: d1, p0",
        "fault [1]: stop of n0: the process id of d0 is 0 (unknown); allowed: d1, p0",
    ]


async def test_a_rank_that_no_instance_has_is_refused_before_any_load() -> None:
    """With those that there are."""
    ranks = [{"rank": at, "pid": 1} for at in range(2)]
    rows = [row("d0", "n0", "http://127.0.0.1:1", 1) | {"ranks": ranks}, row("p0", "n0", "", 2)]
    async with admin(lambda: state_of(*rows)) as port:
        faults = [
            fault("kill", whom={"id": "d0", "rank": 2}),
            fault("kill", whom={"id": "p0", "rank": "random"}),
            fault("kill", whom={"id": "d0", "rank": "random"}),
        ]

        with pytest.raises(ConfigError) as caught:
            await check_faults(parse_faults(faults), port)

    assert caught.value.faults == [
        "fault [0]: no rank 2 of d0; allowed: 0, 1",
        "fault [1]: no rank random of p0; allowed: none, each instance is one process",
    ]


async def test_a_lost_device_is_asked_of_the_instance_and_a_killed_rank_is_not() -> None:
    """The memory of a rank is the instance's; a process that is no rank is not killed for one."""
    asked: list[Any] = []
    async with instance(asked) as url:
        victim = row("d0", "n0", url, os.getpid()) | {"ranks": [{"rank": 1, "pid": os.getpid()}]}
        async with admin(lambda: state_of(victim)) as port:
            lost = [fault("lose_device", whom={"id": "d0", "rank": 1})]
            await inject_faults(injection(port, lost))
            with pytest.raises(FaultError, match="is another one"):
                await inject_faults(injection(port, [fault("kill", whom={"id": "d0", "rank": 1})]))

    assert asked[0] == {"type": "device", "rank": 1}


def test_the_members_of_a_cluster_are_known_before_it_runs() -> None:
    """Its agents only where there will be some; an instance of both roles is of each."""
    nodes = [{"id": "n0", "instances": [{"id": "b0", "role": "both"}]}]
    local, off = (
        {"cluster": {"nodes": nodes}, "backup": {"mode": mode}} for mode in ("local", "off")
    )
    faults = parse_faults(
        [
            fault("kill", whom=whom)
            for whom in ({"id": "agent-n0"}, {"role": "agent"}, {"role": "decode"})
        ]
    )

    assert unknown_victims(faults, members_of(parse_config(local))) == []
    assert len(unknown_victims(faults, members_of(parse_config(off)))) == 2


async def test_a_cluster_without_allow_faults_refuses_faults_before_any_load() -> None:
    """The route is not there; the message names the key."""
    async with (
        instance([], status=404) as url,
        admin(lambda: state_of(row("d0", "n0", url, 1))) as port,
    ):
        with pytest.raises(ConfigError, match=r"d0 takes no faults .*cluster\.allow_faults: true"):
            await check_faults(parse_faults([fault("corrupt_page", pages=1)]), port)

        await check_faults(parse_faults([fault("kill")]), port)


def test_a_stream_counts_where_it_runs_and_its_phase_where_it_is_depended_on() -> None:
    """A decoding stream that depends on pages of a prefill instance counts there by its phase."""

    rows = [row("p0", "n0", "", 1), row("d0", "n0", "", 2), row("d1", "n1", "", 3, health="down")]
    working = (
        stream("a", "prefill"),
        stream("b"),
        stream("c", output_tokens=50),
        stream("d", output_tokens=95),
    )

    seen = views(state_of(*rows, streams=(*working, stream("e", "waiting", output_tokens=9))))

    assert set(seen) == {InstanceId("p0"), InstanceId("d0")}
    assert (seen[InstanceId("p0")].inflight, seen[InstanceId("d0")].inflight) == (1, 3)
    everything = {"a": Phase.PREFILL, "b": Phase.HANDOFF, "c": Phase.DECODE, "d": Phase.NEAR_END}
    assert seen[InstanceId("p0")].streams == seen[InstanceId("d0")].streams == everything


def test_a_stream_without_an_end_decodes_until_it_ends() -> None:
    """A chat names no max_tokens; other clients of the cluster must not stop an experiment."""
    seen = views(
        state_of(row("d0", "n0", "", 1), streams=(stream("a", output_tokens=95, max_tokens=None),))
    )

    assert seen[InstanceId("d0")].streams == {"a": Phase.DECODE}


def test_an_instance_that_does_both_works_on_what_it_prefills() -> None:
    """Its streams name no prefill instance."""
    seen = views(state_of(row("d0", "n0", "", 1), streams=(stream("a", "prefill", prefill=None),)))

    assert (seen[InstanceId("d0")].inflight, seen[InstanceId("d0")].streams) == (
        1,
        {"a": Phase.PREFILL},
    )


def test_an_agent_counts_its_reservations_and_the_streams_that_it_protects() -> None:
    """Reservations come first, pages later: only streams with pages there depend on the agent."""
    streams = (
        stream("a", output_tokens=50, protected={"agent-n1": 7}),
        stream("b", protected={"agent-n1": 0}),
    )

    seen = views(
        state_of(row("d0", "n0", "", 1), streams=streams, agents=(agent("n1", checkpoints=2),))
    )

    view = seen[InstanceId("agent-n1")]
    assert (view.role, view.node, view.inflight, view.streams) == (
        VictimRole.AGENT,
        "n1",
        2,
        {"a": Phase.DECODE},
    )


def test_a_recovery_counts_as_one_where_it_goes_to() -> None:
    """From its decision to its first token; then the stream decodes like any other."""
    recoveries = [{"stream": "a", "outcome": "running"}, {"stream": "b", "outcome": "resumed"}]
    streams = (
        stream("a", prefill=None, output_tokens=50),
        stream("b", prefill=None, output_tokens=50),
    )

    seen = views(state_of(row("d0", "n0", "", 1), streams=streams) | {"recoveries": recoveries})

    assert seen[InstanceId("d0")].streams == {"a": Phase.RECOVERY, "b": Phase.DECODE}
