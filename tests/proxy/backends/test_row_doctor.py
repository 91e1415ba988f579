"""`kvrs doctor` before vLLM servers whose rows an agent serves."""

from typing import Any

from kvrs.cli.cluster_checks import ProxyAnswer, cluster_findings
from kvrs.cli.findings import Level
from kvrs.config.file import parse_config
from kvrs_testkit.vllm_cluster import Builder, document


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
