"""`kvrs doctor` before servers of vLLM and of SGLang whose rows an agent serves."""

from collections.abc import Awaitable, Callable
from typing import Any

from kvrs.cli.cluster_checks import ProxyAnswer, cluster_findings
from kvrs.cli.findings import Level
from kvrs.config.file import parse_config
from kvrs_testkit.sglang_cluster import Sglangs
from kvrs_testkit.sglang_cluster import document as sglang_document
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


async def test_the_doctor_says_which_sglang_servers_share_nothing(
    sglangs: Callable[..., Awaitable[Sglangs]], vllm_model: str
) -> None:
    """Prefill keeps prompts, decode outputs: both are needed. A server has several ranks."""
    system = await sglangs()
    state = await system.state()
    ports = {name: server.port for name, server in system.servers.items()}
    settings = parse_config(sglang_document(vllm_model, ports, backup={"mode": "local"}))

    def rows(ranks: dict[str, str]) -> list[str]:
        regions = [
            {"engine": name, "namespace": rank * 16, "is_alive": True}
            for name, of in ranks.items()
            for rank in of
        ]
        served = {"id": "agent-n0", "health": "up", "reason": None, "regions": regions}
        answer = ProxyAnswer("http://127.0.0.1:1", state | {"agents": [served]})
        found = cluster_findings(settings, answer)
        return [each.value for each in found if each.check == "rows"]

    assert rows(dict.fromkeys(ports, "ab")) == []
    assert rows({"d0": "ab", "p1": "ab", "d1": "ab"}) == ["no agent serves any of p0"]
    assert rows(dict.fromkeys(ports, "ab") | {"d1": "a"}) == ["they mean different things"]


async def test_the_doctor_says_what_is_wrong_with_a_store(vllms: Builder, vllm_model: str) -> None:
    """A wrong one is a fault of all that its server does, also of new prompts."""
    system = await vllms()
    state = await system.state()
    settings = parse_config(
        document(vllm_model, {name: server.port for name, server in system.servers.items()})
    )

    def found(restores: bool | None, *, is_wrong: bool) -> list[tuple[Level, str]]:
        store = {"kind": "mooncake", "restores": restores, "share": 1.0, "is_wrong": is_wrong}
        tested = {
            "done": True,
            "continues": "exact seeded",
            "moves_kv": None,
            "restores": restores,
            "store": store,
            "failures": 0,
            "differs_from": [],
            "cause": "why",
        }
        rows = [row for row in state["instances"] if row["id"] == "d0"]
        answer = ProxyAnswer(
            "http://127.0.0.1:1", state | {"instances": [rows[0] | {"self_test": tested}]}
        )
        findings = cluster_findings(settings, answer)
        return [(each.level, each.value) for each in findings if "self-test" in each.check]

    assert found(True, is_wrong=False) == [(Level.OK, "1 of 1 well")]
    assert found(None, is_wrong=False) == [(Level.OK, "1 of 1 well")]
    none = "nothing is restored from its store (why)"
    assert found(False, is_wrong=False) == [(Level.WARNING, none)]
    wrong = "its store is wrong: new prompts may get what is none of theirs (why)"
    assert found(False, is_wrong=True) == [(Level.FAILURE, wrong)]
