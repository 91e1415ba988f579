"""`kvrs doctor` before vLLM servers with a kvrs connector in them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvrs.cli.cluster_checks import ProxyAnswer, cluster_findings
from kvrs.cli.findings import Finding, Level
from kvrs.config.file import parse_config
from kvrs_testkit.scripted_connector import ScriptedConnector
from kvrs_testkit.vllm_cluster import Builder, Servers, Vllms, document


def equipped(servers: Servers) -> None:
    for name in ("p0", "d0", "d1"):
        servers[name].kvrs = ScriptedConnector(name, servers[name].node)


async def found(
    system: Vllms,
    model: str,
    mode: str = "remote",
    without: str = "",
    change: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Finding]:
    """Findings by an operator's file, in which `without` has no connector."""
    state = copy.deepcopy(await system.state())
    for row in state["instances"]:
        change(row)
    settings = document(
        model,
        {name: server.port for name, server in system.servers.items()},
        {name: port for port, name in enumerate(system.servers, start=1) if name != without},
        backup={"mode": mode},
    )
    answer = ProxyAnswer("http://127.0.0.1:1", state)
    return {each.check: each for each in cluster_findings(parse_config(settings), answer)}


async def until_off(system: Vllms, name: str) -> str:
    reason = ""

    async def is_off() -> bool:
        nonlocal reason
        rows = {row["id"]: row for row in (await system.state())["instances"]}
        reason = rows[name]["connector"]["off_reason"] or ""
        return bool(reason)

    await system.until(is_off)
    return reason


async def test_a_connector_at_work_is_fine(vllms: Builder, vllm_model: str) -> None:
    system = await vllms(equipped, backup={"mode": "remote"})

    findings = await found(system, vllm_model)

    assert findings["connectors"] == Finding("connectors", Level.OK, "3 of 3 well")
    assert "backup.mode" not in findings


@pytest.mark.parametrize("fault", ["gone", "another secret", "another node", "off"])
async def test_a_connector_that_is_not_at_work_is_a_failure_with_its_reason(
    vllms: Builder, vllm_model: str, fault: str
) -> None:
    """It is not reached, does not prove itself, is another one, or has turned itself off."""

    def prepare(servers: Servers) -> None:
        equipped(servers)
        kvrs = servers["d0"].kvrs
        assert kvrs is not None
        match fault:
            case "another secret":
                kvrs.secret = b"another secret" * 3
            case "another node":
                kvrs.node = "n7"
            case "off":
                kvrs.off_reason = "an unknown layout"
            case _:
                assert fault == "gone"

    system = await vllms(prepare, backup={"mode": "remote"})
    if fault == "gone":
        kvrs = system.servers["d0"].kvrs
        assert kvrs is not None
        await kvrs.kill()
    reason = await until_off(system, "d0")

    finding = (await found(system, vllm_model))["connector of d0"]

    words = {
        "gone": "connect",
        "another secret": "prove",
        "another node": "its node is n7, that of the configuration n0",
        "off": "an unknown layout",
    }
    assert finding.level is Level.FAILURE
    assert reason in finding.value
    assert words[fault] in reason
    assert "KVRS_SECRET" in finding.remedy


async def test_what_does_not_fit_together_is_a_warning(vllms: Builder, vllm_model: str) -> None:
    """`backup.mode` is without connectors, or these without it; another version; other KV."""
    system = await vllms(equipped, backup={"mode": "remote"})

    def older(row: dict[str, Any]) -> None:
        row["connector"]["version"] = "0.0.1"

    def other(row: dict[str, Any]) -> None:
        row["connector"]["differs_from"] = ["d1"]

    unused = (await found(system, vllm_model, mode="off"))["backup.mode"]
    partly = (await found(system, vllm_model, without="d1"))["backup.mode"]
    version = (await found(system, vllm_model, change=older))["connector of d0"]
    kv = (await found(system, vllm_model, change=other))["connector of d0"]

    assert {each.level for each in (unused, partly, version, kv)} == {Level.WARNING}
    assert unused.value == "off, and 3 instances have a connector_port"
    assert partly.value == "remote, and no connector_port at d1"
    assert "kvrs 0.0.1" in version.value
    assert "not that of d1" in kv.value


async def test_the_doctor_says_whose_rows_are_served(vllms: Builder, vllm_model: str) -> None:
    def region(engine: str, namespace: str) -> dict[str, Any]:
        return {"engine": engine, "namespace": namespace * 16, "is_alive": True}

    system = await vllms()
    state = await system.state()
    ports = {name: server.port for name, server in system.servers.items()}

    def rows(mode: str, *regions: dict[str, Any]) -> list[str]:
        settings = parse_config(document(vllm_model, ports, backup={"mode": mode}))
        served = {"id": "agent-n0", "health": "up", "reason": None, "regions": [*regions]}
        answer = ProxyAnswer("http://127.0.0.1:1", state | {"agents": [served]})
        found = [each for each in cluster_findings(settings, answer) if each.check == "rows"]
        assert {each.level for each in found} <= {Level.WARNING}
        return [each.value for each in found]

    all_ = [region(name, "a") for name in ("p0", "d0", "d1")]
    assert rows("local", *all_) == []
    assert rows("off") == []
    assert rows("off", *all_[1:]) == ["backup.mode is off, and agents serve rows of d0, d1"]
    assert rows("local", *all_[:2]) == ["no agent serves any of d1"]
    assert rows("local", *all_, region("d1", "b")) == ["they mean different things"]
