"""`kvrs doctor` before servers of vLLM and of SGLang whose rows an agent serves."""

from collections.abc import Awaitable, Callable
from typing import Any

from kvrs.cli.findings import Level, ProxyAnswer, cluster_findings
from kvrs.config.file import parse_config
from kvrs_testkit.sglang_cluster import Sglangs
from kvrs_testkit.sglang_cluster import document as sglang_document
from kvrs_testkit.vllm_cluster import Builder, document


async def test_the_doctor_says_whose_rows_are_served(vllms: Builder, vllm_model: str) -> None:
    def region(engine: str, namespace: str) -> dict[str, Any]:
        return {"engine": engine, "namespace": namespace * 16, "is_alive": True, "rows": 1000}

    system = await vllms()
    state = await system.state()
    ports = {name: server.port for name, server in system.servers.items()}
    restored = {"option": "restore", "loaded_tokens": 1280, "computed_tokens": 26, "at_s": 0.0}
    restored |= {"source": "agent-n0", "from": "d0", "to": "d1"}

    def found(
        mode: str, *regions: dict[str, Any], last: dict[str, Any] | None = None, refused: int = 0
    ) -> list[tuple[Level, str]]:
        written = document(vllm_model, ports, backup={"mode": mode})
        if mode == "remote":
            written["cluster"]["nodes"][0]["agent"]["row_port"] = 9000
        settings = parse_config(written)
        served: dict[str, Any] = {"id": "agent-n0", "health": "up", "reason": None}
        served |= {"regions": [*regions], "refused_rows": refused}
        shown = state | {"agents": [served], "recoveries": [] if last is None else [last]}
        answer = ProxyAnswer("http://127.0.0.1:1", shown)
        checks = ("rows", "refused rows", "restores")
        findings = [each for each in cluster_findings(settings, answer) if each.check in checks]
        return [(each.level, each.value) for each in findings]

    def wrong(*values: str) -> list[tuple[Level, str]]:
        return [(Level.WARNING, value) for value in values]

    all_ = [region(name, "a") for name in ("p0", "d0", "d1")]
    works = "3 regions with 3,000 rows at agent-n0; "
    at = "(d0 to d1, 1970-01-01 00:00:00 UTC)"
    assert found("local", *all_) == [(Level.OK, works + "no restore yet")]
    said = f"the last restore loaded 1,280 of 1,306 tokens {at}"
    assert found("local", *all_, last=restored) == [(Level.OK, works + said)]
    nothing = restored | {"option": "recompute", "loaded_tokens": 0, "computed_tokens": 1306}
    said = f"the last restore loaded 0 of 1,306 tokens {at}"
    assert found("local", *all_, last=nothing) == wrong(said)
    assert found("off") == []
    assert found("off", *all_[1:]) == wrong("backup.mode is off, and agents serve rows of d0, d1")
    assert found("local", *all_[:2]) == wrong("no agent serves any of d1")
    assert found("local", *all_, region("d1", "b")) == wrong("they mean different things")
    assert found("local", *all_, refused=1002)[0] == (Level.WARNING, "1,002 at agent-n0")
    alone = "no agent copies those of d0, d1, p0, which a loss of the node takes along"
    assert found("remote", *all_)[0] == (Level.WARNING, alone)


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
            {"engine": name, "namespace": rank * 16, "is_alive": True, "rows": 1}
            for name, of in ranks.items()
            for rank in of
        ]
        served = {"id": "agent-n0", "health": "up", "reason": None, "regions": regions}
        answer = ProxyAnswer("http://127.0.0.1:1", state | {"agents": [served]})
        found = cluster_findings(settings, answer)
        return [each.value for each in found if each.check == "rows" and each.remedy]

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
