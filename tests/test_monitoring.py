"""Alerting rules and dashboard: they name metrics that exist, and each alert fires and clears."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrs.ids import InstanceId
from kvrs.proxy.api.rows import AGENTS, INSTANCES, PROXY
from kvrs.proxy.streams.metrics import Metrics

NAME = re.compile(r"\b(?:kvrs|process|python)_[a-z0-9_]+")
METRIC = re.compile(r"\bkvrs_[a-z0-9_]+")
ROOT = Path(__file__).parents[1]
GUIDE, MONITORING = ROOT / "docs" / "guide", ROOT / "deploy" / "helm" / "files"
EXAMPLE = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool, which comes with Prometheus"
)
# What a rule is tested with: series before and during what it is to notice, then after it. A step
# is 15 s, the death between the tenth and the eleventh scrape.
WORKER, JOB = 'worker="d0", instance="proxy:8001"', 'job="kvrs", instance="proxy:8001"'
DRAFTS = f"source='draft', {WORKER}"
BEFORE_S = 10 * 15
CASES: dict[str, dict[str, str]] = {
    "KvrsWorkerDied": {
        f'kvrs_worker_deaths_total{{cause="silent", {WORKER}}}': "0x10 1x20",
    },
    "KvrsAgentDied": {
        'kvrs_agent_deaths_total{cause="silent", agent="agent-n0"}': "0x10 1x20",
    },
    "KvrsRankDied": {f"kvrs_worker_rank_deaths_total{{{WORKER}}}": "0x10 1x20"},
    "KvrsProxyRestarted": {f"process_start_time_seconds{{{JOB}}}": "100x10 260x20"},
    "KvrsProxyDown": {f"up{{{JOB}}}": "1x10 0x5 1x15"},
    "KvrsWorkerDown": {f"kvrs_worker_up{{{WORKER}}}": "1x10 0x12 1x8"},
    "KvrsWorkerDegraded": {
        f"kvrs_worker_degree{{{WORKER}}}": "4x10 3x12 4x8",
        f"kvrs_worker_full_degree{{{WORKER}}}": "4x30",
    },
    "KvrsStageBorrowed": {f"kvrs_borrowed_stages{{{WORKER}}}": "0x10 1x12 0x8"},
    "KvrsAgentDown": {'kvrs_agent_up{agent="agent-n0"}': "1x10 0x12 1x8"},
    "KvrsRoleDown": {
        f"kvrs_worker_up{{{WORKER}}}": "1x10 0x5 1x15",
        f'kvrs_worker_streams{{role="decode", {WORKER}}}': "3x10 0x5 3x15",
        'kvrs_worker_up{worker="p0", instance="proxy:8001"}': "1x30",
        'kvrs_worker_streams{role="prefill", worker="p0", instance="proxy:8001"}': "0x30",
    },
    "KvrsWorkerUnprotected": {f"kvrs_worker_unprotected{{{WORKER}}}": "0x10 1x12 0x8"},
    "KvrsPeerUnreached": {f"kvrs_peers_unreached{{{JOB}}}": "0x10 1x12 0x8"},
    "KvrsWorkerEjected": {f"kvrs_worker_ejected{{{WORKER}}}": "0x10 1x5 0x15"},
    "KvrsStreamsGivenUp": {'kvrs_streams_given_up_total{reason="retries"}': "0x10 1x20"},
    "KvrsOverloaded": {'kvrs_streams_given_up_total{reason="overloaded"}': "0x10 9x20"},
    "KvrsStreamsUnprotected": {"kvrs_streams_unprotected": "0x10 4x12 0x8"},
    "KvrsStoreWrong": {f"kvrs_worker_store_wrong{{{WORKER}}}": "0x10 1x5 0x15"},
    "KvrsWorkerDiffers": {f"kvrs_worker_differs{{{WORKER}}}": "0x10 1x12 0x8"},
    "KvrsRowsRefused": {'kvrs_agent_refused_rows_total{agent="agent-n0"}': "0x10 1x20"},
    "KvrsTokenizerMissing": {"kvrs_tokenizer_missing": "0x10 1x12 0x8"},
    "KvrsReloadRefused": {f"kvrs_config_last_reload_successful{{{JOB}}}": "1x10 0x12 1x8"},
    "KvrsPredictionsOff": {
        'kvrs_recovery_off_ratio_bucket{option="migrate", le="2"}': "0x70",
        'kvrs_recovery_off_ratio_bucket{option="migrate", le="4"}': "0x10 20x60",
        'kvrs_recovery_off_ratio_bucket{option="migrate", le="+Inf"}': "0x10 20x60",
        'kvrs_recovery_off_ratio_count{option="migrate"}': "0x10 20x60",
    },
    # Usual ones before, of which more than a thousand are no reason either.
    "KvrsDraftsInVain": {
        f"kvrs_draft_tokens_total{{{DRAFTS}, outcome='accepted'}}": "0+50x10 500x60",
        f"kvrs_draft_tokens_total{{{DRAFTS}, outcome='rejected'}}": "0+90x10 900x60",
        f"kvrs_draft_tokens_total{{{DRAFTS}, outcome='stale'}}": "0+300x10 60000x60",
    },
    "KvrsDamagedPages": {f"kvrs_damaged_pages_total{{{WORKER}}}": "0x10 1x60"},
    "KvrsHandOffFaults": {
        f"kvrs_hand_off_faults_total{{{WORKER}, kind='late'}}": "0x10 1+1x70 71x40"
    },
    "KvrsTaskFailed": {'kvrs_task_failures_total{task="slots"}': "0x10 1x60"},
    "KvrsEventLoopSlow": {
        'kvrs_event_loop_lag_seconds_bucket{instance="a", le="0.1"}': "0+30x10 300x44 300+30x40",
        'kvrs_event_loop_lag_seconds_bucket{instance="a", le="0.5"}': "0+30x10 300+30x84",
        'kvrs_event_loop_lag_seconds_bucket{instance="a", le="+Inf"}': "0+30x10 300+30x84",
    },
    "KvrsFewDescriptors": {
        f"process_open_fds{{{JOB}}}": "90x10 950x24 90x10",
        f"process_max_fds{{{JOB}}}": "1000x44",
    },
}


def alert_rules() -> str:
    return (MONITORING / "alerts.yaml").read_text(encoding="utf-8")


def dashboard_json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return found


def rules() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(alert_rules())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def all_panels() -> list[dict[str, Any]]:
    """The dashboard's panels, those in collapsed rows included."""
    return [each for one in dashboard_json()["panels"] for each in (one, *one.get("panels", []))]


def expressions() -> Iterator[str]:
    """The dashboard's expressions, with values in the place of its variables."""
    targets = [target for panel in all_panels() for target in panel.get("targets", [])]
    values = {"$__rate_interval": "1m", "$__range": "1h", "$proxy": ".*"}
    for each in [*targets, *dashboard_json()["annotations"]["list"]]:
        text = each["expr"]
        for name, value in values.items():
            text = text.replace(name, value)
        yield text


def exported() -> set[str]:
    """The names of all samples."""
    metrics = Metrics([InstanceId("d0")], [InstanceId("agent-n0")])
    names = {*INSTANCES, *AGENTS, *PROXY}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        names |= {family.name, *(sample.name for sample in family.samples)}
        names |= {f"{family.name}_total"} if family.type == "counter" else set()
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def test_every_metric_that_is_watched_is_exported() -> None:
    """A name that nothing exports is an alert that never fires, and an empty panel."""
    names = exported()

    watched = {
        name
        for text in (*expressions(), *(rule["expr"] for rule in rules().values()))
        for name in NAME.findall(text)
    }

    assert len(watched) > 30
    assert watched <= names


def test_metrics_in_examples_of_the_guide_are_exported() -> None:
    """An autoscaler that asks for another name never scales."""
    pages = [page.read_text() for page in sorted(GUIDE.glob("*.md"))]
    examples = [text for page in pages for text in EXAMPLE.findall(page)]

    named = {name for text in examples for name in METRIC.findall(text)}

    assert named
    assert named <= exported()


def test_every_alert_says_how_grave_it_is_and_what_happened() -> None:
    """A page at night has a sentence, and a severity that routes it."""
    for name, rule in rules().items():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name
        assert len(rule["annotations"]["summary"]) > 20, name


def test_requests_that_are_at_fault_count_neither_as_unavailability_nor_as_given_up() -> None:
    """In no alert and no panel of failures; how many there are is shown by the outcomes."""
    rules = yaml.safe_load(alert_rules())["groups"]
    alerts = [rule["expr"] for group in rules for rule in group["rules"]]
    panels = {
        panel["title"]: [target["expr"] for target in panel.get("targets", [])]
        for panel in all_panels()
    }
    (availability,) = panels["Availability"]

    assert re.findall(r'outcome=~"([^"]*)"', availability) == ["complete", "complete|failed"]
    assert not any("rejected" in each for each in alerts)
    for query in [*alerts, *expressions()]:
        if (
            given_up := re.search(r"kvrs_streams_given_up_total\{[^}]*reason([^}]*)\}", query)
        ) is None:
            assert "kvrs_streams_given_up_total" not in query
            continue
        is_left_out = given_up[1].startswith("!") and "refused" in given_up[1]
        assert is_left_out or "refused" not in given_up[1]


def test_panels_neither_overlap_nor_share_a_number() -> None:
    """Grafana moves panels that overlap, and drops those with the number of another."""
    panels = all_panels()
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_has_a_runbook_and_names_it() -> None:
    """In the order of the rules; a runbook of an alert that went goes too."""
    page = (GUIDE / "runbooks.md").read_text(encoding="utf-8")

    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [*rules()]
    for name, rule in rules().items():
        assert rule["annotations"]["runbook"] == f"kvrs docs runbooks#{name.lower()}"


def test_the_dashboard_begins_with_single_numbers_and_explains_each_panel() -> None:
    """Deaths are marked in all curves. Panels of what only the embedded engine has, empty before
    vLLM, are in a row that is collapsed.
    """
    whole = dashboard_json()
    (first, *_), (*_, last) = whole["panels"], whole["panels"]
    top = [each for each in all_panels() if each["gridPos"]["y"] == first["gridPos"]["y"]]
    embedded = re.compile(r"degree|expert|borrowed|lent_|checkpoint_lag|draft")

    assert {each["type"] for each in top} == {"stat"}
    assert sum(each["gridPos"]["w"] for each in top) == 24
    shown = [each for each in all_panels() if each["type"] != "row"]
    assert [each["title"] for each in shown if len(each.get("description", "")) < 20] == []
    marked = " ".join(each["expr"] for each in whole["annotations"]["list"])
    assert {*METRIC.findall(marked)} == {"kvrs_worker_deaths_total", "kvrs_agent_deaths_total"}
    assert last["collapsed"] is True
    folded = [each for each in shown if embedded.search(json.dumps(each["targets"]))]
    assert folded == last["panels"]


def test_every_alert_has_a_case() -> None:
    """A rule without one may never have fired."""
    assert rules().keys() == CASES.keys()


@needs_promtool
@pytest.mark.process
def test_each_alert_fires_and_clears(tmp_path: Path) -> None:
    """Quiet before; fires after one more scrape, or what it waits for; quiet again at the end."""
    (tmp_path / "rules.yaml").write_text(alert_rules())
    (tmp_path / "tests.yaml").write_text(
        json.dumps(
            {
                "rule_files": ["rules.yaml"],
                "evaluation_interval": "15s",
                "tests": [_case(name) for name in CASES],
            }
        )
    )

    found = promtool("test", "rules", "tests.yaml", folder=tmp_path)

    assert found.returncode == 0, found.stdout + found.stderr


@needs_promtool
@pytest.mark.process
def test_every_query_of_the_dashboard_can_be_read(tmp_path: Path) -> None:
    """A panel with a query that is wrong shows an error in place of a curve."""
    recorded = [{"record": f"q:{at}", "expr": text} for at, text in enumerate(expressions())]
    (tmp_path / "rules.yaml").write_text(
        json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]})
    )

    found = promtool("check", "rules", "rules.yaml", folder=tmp_path)

    assert found.returncode == 0, found.stdout + found.stderr


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def _case(name: str) -> dict[str, Any]:
    series = CASES[name]
    # `1x20` is a value and twenty more.
    steps = max(
        sum(int(part.partition("x")[2]) + 1 for part in values.split())
        for values in series.values()
    )
    waits_s = 60 * int(rules()[name].get("for", "0m").removesuffix("m"))
    if "[5m]" in rules()[name]["expr"]:
        waits_s += 300
    firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) > 0'
    count = {"labels": "{}", "value": 1}
    times = {BEFORE_S: [], BEFORE_S + 15 + waits_s: [count], 15 * (steps - 1): []}
    return {
        "name": name,
        "interval": "15s",
        "input_series": [{"series": key, "values": value} for key, value in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{at_s}s", "exp_samples": samples}
            for at_s, samples in times.items()
        ],
    }
