"""`kvrs doctor` before machines and clusters that have something to mend."""

import asyncio
import copy
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrs.cli.doctor import machine_findings
from kvrs.cli.feasibility import faults_of
from kvrs.cli.findings import Finding, Level, ProxyAnswer, ask, cluster_findings
from kvrs.config.file import Config, load_config, parse_config
from kvrs_testkit.awaited import forked
from kvrs_testkit.certificates import MISSING, Authority
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.multi_proxy_cluster import open_proxy_group
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster

needs_openssl = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

NOT_ASKED = ProxyAnswer("http://127.0.0.1:1", cause="not asked")


def machine(document: dict[str, Any], answer: ProxyAnswer = NOT_ASKED) -> dict[str, Finding]:
    """The machine's findings, by check."""
    found = list(machine_findings(parse_config(document), {}, answer))
    return {each.check: each for each in found}


def cluster(config: Config, state: dict[str, Any]) -> dict[str, Finding]:
    found = list(cluster_findings(config, ProxyAnswer("http://127.0.0.1:1", state)))
    return {each.check: each for each in found}


def private(folder: Path, mode: int) -> Path:
    file = folder / "private"
    file.write_text("s" * 40)
    file.chmod(mode)
    return file


# The machine.


@pytest.mark.network
@pytest.mark.parametrize("key", ["secret_file", "admin_token_file", "key_file"])
def test_a_private_file_that_others_may_read_is_a_failure(tmp_path: Path, key: str) -> None:
    """The line has the mode bits, the mode that is allowed and the command that mends it."""
    file = private(tmp_path, 0o644)

    found = machine({"security": {key: str(file)}})[f"security.{key}"]

    assert found.level is Level.FAILURE
    assert "mode bits 044" in found.value
    assert (found.allowed, found.remedy) == ("0600", f"chmod 600 {file}")


@pytest.mark.network
def test_a_private_file_that_only_its_owner_reads_is_fine(tmp_path: Path) -> None:
    """Its mode is shown."""
    file = private(tmp_path, stat.S_IRUSR | stat.S_IWUSR)

    found = machine({"security": {"secret_file": str(file)}})

    assert found["security.secret_file"] == Finding(
        "security.secret_file", Level.OK, f"{file}, mode 0600"
    )
    assert "secret" not in found


@needs_openssl
@pytest.mark.network
@pytest.mark.process
@pytest.mark.parametrize(
    ("days", "level"), [(90, Level.OK), (5, Level.WARNING), (-1, Level.FAILURE)]
)
def test_certificates_are_renewed_before_they_expire(
    tmp_path: Path, days: int, level: Level
) -> None:
    """A warning two weeks before the end."""
    pair = Authority(tmp_path).issue("n0", days)

    found = machine({"proxy": {"tls": pair.section()}})

    assert found["proxy.tls" if days < 0 else "proxy.tls.cert"].level is level


@needs_openssl
@pytest.mark.network
@pytest.mark.process
def test_the_certificate_of_the_ca_is_looked_at_too(tmp_path: Path) -> None:
    """With it every connection within the cluster ends."""
    ca = Authority(tmp_path)  # Of two days.

    found = machine({"security": {"tls": ca.issue("n0", 90).section(ca.cert)}})

    assert found["security.tls.cert"].level is Level.OK
    assert found["security.tls.client_ca"].level is Level.WARNING


@needs_openssl
@pytest.mark.network
@pytest.mark.process
def test_a_key_that_others_may_read_is_a_failure(tmp_path: Path) -> None:
    """The command names the key, not the certificate."""
    pair = Authority(tmp_path).issue("n0", 90)
    pair.key.chmod(0o640)

    found = machine({"proxy": {"admin_tls": pair.section()}})["proxy.admin_tls"]

    assert (found.level, found.remedy) == (Level.FAILURE, f"chmod 600 {pair.key}")


@pytest.mark.network
def test_memory_that_agents_will_not_get_is_a_failure() -> None:
    """They do not start where there is less."""
    found = machine({"backup": {"mode": "local", "capacity_bytes": 1 << 50}})

    assert found["memory"].level is Level.WARNING
    assert found["shared memory"].level is Level.FAILURE


@pytest.mark.network
def test_faults_of_the_configuration_are_findings(tmp_path: Path) -> None:
    """Those of `kvrs config check`, each with value and what is allowed."""
    log = tmp_path / "missing" / "events.jsonl"

    found = machine({"proxy": {"event_log": str(log)}})["configuration"]

    assert found.level is Level.FAILURE
    assert str(log) in found.value
    assert found.allowed == "a file in a directory that is writable"


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "value"),
    [("KVRS_SECRET", "short"), ("KVRS_ADMIN_TOKEN", "short"), ("KVRS_KEYS", "no: list")],
)
def test_faults_of_the_environment_are_those_of_config_check(name: str, value: str) -> None:
    """A process of it would not start."""
    config, environ = parse_config({}), {name: value}

    faults = faults_of(config, environ)
    found = [
        each.value
        for each in machine_findings(config, environ, NOT_ASKED)
        if (each.check, each.level) == ("configuration", Level.FAILURE)
    ]

    assert name in faults[0]
    assert found == [fault.partition("; allowed: ")[0] for fault in faults]


@pytest.mark.process
@pytest.mark.network
def test_few_descriptors_are_a_warning(tmp_path: Path) -> None:
    """The proxy runs, for fewer streams; the status stays 0."""
    file = tmp_path / "kvrs.yaml"
    file.write_text(json.dumps({"proxy": {"port": 0, "admin_port": 0}}))
    doctor = [sys.executable, "-m", "kvrs", "doctor", "--json", "--config", str(file)]

    ran = subprocess.run(
        ["bash", "-c", 'ulimit -n 1000; exec "$@"', "-", *doctor], capture_output=True, check=True
    )

    (found,) = (row for row in json.loads(ran.stdout)["machine"] if row["check"] == "descriptors")
    assert (found["level"], ran.stderr) == ("warning", b"")
    assert "hard 1,000" in found["value"]
    assert "LimitNOFILE" in found["remedy"]


# The cluster.


async def asked(config: Config) -> ProxyAnswer:
    return await asyncio.to_thread(ask, config, {})


def config_of(system: ProxyCluster, **sections: Any) -> dict[str, Any]:
    """A configuration like an operator's file, with the ports that were chosen."""
    nodes: dict[str, list[dict[str, Any]]] = {}
    for name, instance in system.instances.items():
        row = {"id": name, "role": instance.role.value, "port": instance.port}
        nodes.setdefault(instance.node, []).append(row)
    proxy = {"port": system.proxy.port, "admin_port": system.proxy.admin_port}
    cluster = {"nodes": [{"id": node, "instances": rows} for node, rows in nodes.items()]}
    return {"proxy": proxy, "cluster": cluster, **sections}


async def when_tested(system: ProxyCluster) -> Any:
    """The state, when the self-tests have ended."""

    async def holds() -> bool:
        rows = (await system.state())["instances"]
        return all(row["self_test"] is not None and row["self_test"]["done"] for row in rows)

    await system.until(holds)
    return await system.state()


@pytest.mark.process
@pytest.mark.network
@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, "ok"),
        ({"KVRS_BACKUP__MODE": "local"}, "warning"),
        ({"KVRS_PROXY__PEER_PORT": "4"}, "warning"),
    ],
)
async def test_doctor_before_a_proxy_runs_asks_for_a_secret_only_where_one_is_shared(
    variables: dict[str, str], level: str
) -> None:
    """The last line says that the cluster was not checked, and what checks it."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("KVRS_")}
    running = await forked(
        *("kvrs", "doctor", "--admin-url", NOT_ASKED.url),
        environment=bare | variables,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await running.communicate()

    lines = output.decode().splitlines()
    (secret,) = (line for line in lines if line.partition(":")[0].endswith(" secret"))
    assert secret.split()[0] == level
    assert "the cluster was not checked: --admin-url URL" in lines[-1]


@pytest.mark.process
@pytest.mark.network
async def test_a_death_is_a_failure_of_a_cluster_that_was_well(tmp_path: Path) -> None:
    """Status 0, and 1 after it."""
    async with open_proxy_cluster(proxy={"self_test": True}) as system:
        file = tmp_path / "kvrs.yaml"
        file.write_text(json.dumps(config_of(system)))
        await when_tested(system)

        async def doctor(*more: str) -> tuple[int | None, bytes]:
            running = await forked(
                *("kvrs", "doctor", "--config", str(file), *more),
                environment=os.environ,
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await running.communicate()
            return running.returncode, output

        status, well = await doctor()
        assert status == 0, well.decode()
        assert b"ok      instances: 4 of 4 well" in well
        assert b"ok      self-tests: 4 of 4 well" in well
        assert b"0 failures" in well
        assert b"not checked" not in well

        await system.instances["d1"].kill()
        await system.until_health(d1="down")
        status, ill = await doctor("--json")

    rows = {row["check"]: row for row in json.loads(ill)["cluster"]}
    assert status == 1
    assert rows["instance d1"]["level"] == "failure"
    assert "start it" in rows["instance d1"]["remedy"]


@pytest.mark.network
async def test_what_self_tests_have_seen_is_judged() -> None:
    """KV that does not move and streams that end are failures; what is less exact is a warning."""
    async with open_proxy_cluster(pairs=1, proxy={"self_test": True}) as system:
        state = await when_tested(system)
        config = parse_config(config_of(system))
    row = next(row for row in state["instances"] if row["id"] == "d0")["self_test"]

    def judged(**seen: Any) -> Finding:
        changed = copy.deepcopy(state)
        for each in changed["instances"]:
            each["self_test"] = row | seen
        found = cluster(config, changed)
        return found.get("self-test of d0") or found["self-tests"]

    assert judged().level is Level.OK
    assert judged(moves_kv=False, cause="no KV moved from p0 to d0").level is Level.FAILURE
    assert (
        "no KV moved from p0 to d0"
        in judged(moves_kv=False, cause="no KV moved from p0 to d0").value
    )
    assert judged(continues="none").level is Level.FAILURE
    assert judged(continues="text-stitched").level is Level.WARNING
    unable = judged(continues="exact greedy", capabilities=[])
    assert (unable.level, "kvrs.vllm.replay:Replay" in unable.remedy) == (Level.WARNING, True)
    able = judged(continues="exact greedy", capabilities=["replay"])
    assert able.level is Level.OK
    assert judged(done=False).level is Level.WARNING
    assert judged(moves_kv=None).level is Level.OK
    slow = judged(moves_kv=None, failures=5, cause="no answer within 60 s")
    assert (slow.level, slow.value) == (Level.WARNING, "not known (no answer within 60 s)")
    unrestored = judged(restores=False, cause="loaded none of 2 pages")
    assert unrestored.level is Level.FAILURE
    assert "loaded none of 2 pages" in unrestored.value
    assert judged(restores=True).level is Level.OK


@pytest.mark.process
@pytest.mark.network
async def test_an_instance_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    """With its address and why it is not reached; `kvrs top` shows the same. It was given some
    seconds to come up.
    """
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    file = tmp_path / "kvrs.yaml"
    async with open_proxy_cluster(pairs=1, read=partial(load_config, file)) as system:
        document = config_of(system)
        missing = {"id": "d9", "role": "decode", "port": port}
        document["cluster"]["nodes"][0]["instances"].append(missing)
        file.write_text(json.dumps(document))
        reload = f"http://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/reload"
        async with system.http.post(reload) as answer:
            assert answer.status == 200, await answer.text()

        async def ran(*command: str) -> tuple[int | None, str]:
            running = await forked(
                *("kvrs", *command, "--config", str(file)),
                environment=os.environ,
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await running.communicate()
            return running.returncode, output.decode()

        status, report = await ran("doctor")
        _, shown = await ran("top", "--once")

    cause = f"connection lost: Connection refused ({url})"
    assert status == 1
    assert f"failure instance d9: starting ({cause}); allowed: up; to do: start it" in report
    assert f"d9: {cause}" in shown


@pytest.mark.network
async def test_an_instance_that_still_loads_is_no_failure() -> None:
    """A model may load for minutes: only an instance that has met a fault is one."""
    async with open_proxy_cluster(pairs=1) as system:
        state, config = await system.state(), system.proxy.reloads.config
    state["instances"][0] |= {"health": "starting", "reason": None}

    found = cluster(config, state)["instance p0"]

    assert (found.level, found.value, found.allowed) == (Level.WARNING, "starting", "up")


@pytest.mark.network
async def test_each_fault_of_a_row_says_what_is_allowed() -> None:
    """Rows of all kinds, each wrong."""
    async with open_proxy_cluster(pairs=1) as system:
        state, config = await system.state(), system.proxy.reloads.config
    p0, d0 = state["instances"]
    p0 |= {"health": "down", "reason": None}
    d0["self_test"] = {**(d0["self_test"] or {}), "done": False, "cause": "too slow"}
    d0["hand_offs"] = {"format": "a", "differs_from": ["p0"]}

    wrong = [each for each in cluster(config, state).values() if each.level is not Level.OK]

    assert {"instance p0", "self-test of d0", "hand-offs of d0"} <= {one.check for one in wrong}
    assert [one.check for one in wrong if not one.allowed or not one.remedy] == []


@pytest.mark.network
async def test_a_key_that_an_engine_does_not_take_is_a_failure() -> None:
    """With the variable to set: nothing else of the cluster can mend it."""
    async with open_proxy_cluster(pairs=1) as system:
        state, config = await system.state(), system.proxy.reloads.config
    reason = "HTTP 403 to a completion, by itself or a gateway in front of it: its key"
    state["instances"][0] |= {"health": "refused", "reason": reason}

    found = cluster(config, state)["instance p0"]

    assert (found.level, reason in found.value) == (Level.FAILURE, True)
    assert "KVRS_VLLM_API_KEY" in found.remedy


@pytest.mark.network
async def test_a_peer_that_is_not_reached_is_a_failure() -> None:
    """Streams could not be resumed at another proxy. The remedy names the likely mistake. One that
    comes up while the doctor looks is waited for.
    """
    async with open_proxy_group(pairs=1) as group:
        admin = {"admin_port": group.proxy(0).admin_port}
        document = group.configs[0].model_dump(mode="json")
        config = parse_config(document | {"proxy": document["proxy"] | admin})

        await group.kill(1)
        await group.until(lambda: not group.mirror(0).peers.live)
        missing = list(cluster_findings(config, await asyncio.to_thread(ask, config, {}, 0.0)))
        asking = asyncio.create_task(asyncio.to_thread(ask, config, {}, 60.0))
        await asyncio.sleep(1.0)
        is_waiting = not asking.done()
        await group.start(1)
        well = list(cluster_findings(config, await asking))

    (found,) = (each for each in missing if each.check == "peers of the proxy")
    assert (found.level, found.value[:27]) == (Level.FAILURE, "proxy-1 of 1 cannot be reac")
    assert "`workers`" in found.remedy
    assert is_waiting
    assert ("peers of the proxy", Level.OK) in ((each.check, each.level) for each in well)


@pytest.mark.network
async def test_another_version_or_configuration_is_a_warning() -> None:
    """The running proxy is compared with the installed version and the given file."""
    async with open_proxy_cluster(pairs=1) as system:
        state = await system.state()
        other = parse_config(config_of(system))
        same = system.proxy.reloads.config

    assert cluster(same, state)["configuration in use"].level is Level.OK
    assert cluster(other, state)["configuration in use"].level is Level.WARNING
    assert "version" not in cluster(same, state)
    state["proxies"][0]["version"] = "0.0.1"
    assert cluster(same, state)["version"].level is Level.WARNING
    assert cluster(same, state)["self-test"].value == "off"


@pytest.mark.network
async def test_agents_and_members_that_are_gone_are_named() -> None:
    """An agent that is down is a failure: its checkpoints are lost."""
    async with open_proxy_cluster(pairs=1, backup={"mode": "local"}) as system:
        state, config = await system.state(), system.proxy.reloads.config

    assert cluster(config, state)["agents"].level is Level.OK
    state["agents"][0] |= {"health": "down", "reason": "connection refused"}
    state["members"] = [{"id": "n0", "status": "dead"}, {"id": "proxy-0", "status": "alive"}]
    found = cluster(config, state)
    assert found["agent agent-n0"].level is Level.FAILURE
    assert "connection refused" in found["agent agent-n0"].value
    assert found["gossip member n0"].level is Level.WARNING


@needs_openssl
@pytest.mark.network
@pytest.mark.process
async def test_an_admin_port_with_tls_and_a_token_is_asked(tmp_path: Path) -> None:
    """By its own certificate, which need not have the name that it is reached by; without the
    token the answer is a failure that says what is missing.
    """
    ca = Authority(tmp_path)
    token = private(tmp_path, 0o600)
    security = {"admin_token_file": str(token)}
    tls = ca.issue("n0", 90).section(ca.cert)
    async with open_proxy_cluster(
        pairs=1, wait=False, proxy={"admin_tls": tls}, security=security
    ) as system:
        document = config_of(system)
        document["proxy"]["admin_tls"] = tls

        without = await asked(parse_config(document))
        allowed = await asked(parse_config({**document, "security": security}))

    (found,) = cluster_findings(parse_config(document), without)
    assert (found.level, without.cause) == (Level.FAILURE, "HTTP 401")
    assert "KVRS_ADMIN_TOKEN" in found.remedy
    assert allowed.state is not None


@pytest.fixture
def listen() -> Iterator[Callable[[bytes], int]]:
    """A server that gives one answer to one client; returns its port."""
    sockets, threads = [], []

    def start(answer: bytes) -> int:
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threads.append(thread := threading.Thread(target=serve))
        thread.start()
        return int(listening.getsockname()[1])

    yield start
    for thread in threads:
        thread.join(10)
    for each in sockets:
        each.close()


@pytest.mark.network
@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_is_no_admin_port_of_a_proxy_is_a_failure(
    listen: Callable[[bytes], int], answer: bytes
) -> None:
    """Whatever it answers."""
    config = parse_config({"proxy": {"admin_port": listen(answer)}})

    found = ask(config, {})

    assert (found.state, found.is_taken) == (None, True)
    assert [each.level for each in cluster_findings(config, found)] == [Level.FAILURE]


@pytest.mark.network
def test_a_proxy_that_does_not_run_is_a_warning() -> None:
    """The machine is checked before the first start."""
    config = parse_config({"proxy": {"admin_port": free_ports(1)[0]}})

    (found,) = cluster_findings(config, ask(config, {}))

    assert found.level is Level.WARNING
    assert "Connection refused" in found.value
