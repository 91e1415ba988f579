"""`kvrs alerts` and `kvrs dashboard`: what Prometheus and Grafana are given; nothing is started."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # As Grafana names it.
    queries: tuple[tuple[str, str], ...]  # Expression and legend.


def _quantiles(metric: str, by: str = "", legend: str = "") -> tuple[tuple[str, str], ...]:
    keys = f"le, {by}" if by else "le"
    buckets = f"sum by ({keys}) (rate({metric}_bucket{_OF}[$__rate_interval]))"
    return tuple(
        (f"histogram_quantile({share}, {buckets})", f"p{share * 100:g} {legend}".strip())
        for share in (0.5, 0.9, 0.99)
    )


def _rate(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({by}) (rate({metric}{_OF}[$__rate_interval]))", f"{{{{{by}}}}}"),)


def _each_rate(metric: str, legend: str) -> tuple[str, str]:
    query = f"sum by (worker) (rate({metric}{_OF}[$__rate_interval]))"
    return query, f"{legend} {{{{worker}}}}"


_OF = '{instance=~"$proxy"}'
# Requests that were rejected for their own fault, or whose client left, say nothing of the cluster.
_SERVED = 'sum(rate(kvrs_requests_total{{instance=~"$proxy",outcome=~"{}"}}[$__rate_interval]))'
_AVAILABILITY = f"{_SERVED.format('complete')} / {_SERVED.format('complete|failed')}"

ROWS: dict[str, list[Panel]] = {
    "What clients see": [
        Panel("Requests by outcome", "reqps", _rate("kvrs_requests_total", "outcome")),
        Panel("Availability", "percentunit", ((_AVAILABILITY, "complete of those not rejected"),)),
        Panel(
            "Tokens",
            "short",
            (
                (f"sum(rate(kvrs_tokens_relayed_total{_OF}[$__rate_interval]))", "output/s"),
                (f"sum(rate(kvrs_prompt_tokens_total{_OF}[$__rate_interval]))", "prompt/s"),
            ),
        ),
        Panel(
            "Open streams",
            "short",
            (
                (f"sum(kvrs_streams_active{_OF})", "open"),
                (f"sum(kvrs_streams_waiting{_OF})", "without a place"),
                (f"sum(kvrs_streams_unprotected{_OF})", "without a checkpoint"),
            ),
        ),
        Panel("Time to the first token", "s", _quantiles("kvrs_ttft_seconds")),
        Panel("Time per output token", "s", _quantiles("kvrs_tpot_seconds")),
        Panel("Time to the end", "s", _quantiles("kvrs_e2e_seconds")),
        Panel("Longest pause of a stream", "s", _quantiles("kvrs_client_gap_seconds")),
        Panel(
            "Time by stage",
            "percentunit",
            (
                (
                    f"sum by (stage) (rate(kvrs_stage_seconds_sum{_OF}[$__rate_interval]))"
                    " / ignoring (stage) group_left () "
                    f"sum(rate(kvrs_stage_seconds_sum{_OF}[$__rate_interval]))",
                    "{{stage}}",
                ),
            ),
        ),
        Panel(
            "Streams given up",
            "short",
            (
                (
                    'sum by (reason) (rate(kvrs_streams_given_up_total{instance=~"$proxy",'
                    'reason!="refused"}[$__rate_interval]))',
                    "{{reason}}",
                ),
            ),
        ),
    ],
    "Failures and recoveries": [
        Panel("Instances in use", "short", ((f"kvrs_worker_up{_OF}", "{{worker}}"),)),
        Panel(
            "Deaths",
            "short",
            (
                (
                    f"increase(kvrs_worker_deaths_total{_OF}[$__rate_interval])",
                    "{{worker}} {{cause}}",
                ),
                (
                    f"increase(kvrs_agent_deaths_total{_OF}[$__rate_interval])",
                    "{{agent}} {{cause}}",
                ),
            ),
        ),
        Panel("Notice of a death", "s", _quantiles("kvrs_worker_death_notice_seconds")),
        Panel("Recoveries by option", "short", _rate("kvrs_recoveries_total", "option")),
        Panel("Recoveries by outcome", "short", _rate("kvrs_recoveries_total", "outcome")),
        Panel(
            "Duration of recoveries",
            "s",
            _quantiles("kvrs_recovery_real_seconds", "option", "{{option}}")[1:2]
            + _quantiles("kvrs_recovery_predicted_seconds", "option", "{{option}} predicted")[1:2],
        ),
        Panel(
            "Learned factor on predictions",
            "short",
            ((f"kvrs_recovery_correction_ratio{_OF}", "{{option}}"),),
        ),
    ],
    "Instances, agents and links": [
        Panel("Open streams by instance", "short", ((f"kvrs_worker_streams{_OF}", "{{worker}}"),)),
        Panel(
            "Queued requests by role",
            "short",
            ((f"sum by (role) (kvrs_worker_queued_requests{_OF})", "{{role}}"),),
        ),
        Panel(
            "Wait in the queue by instance",
            "s",
            ((f"kvrs_worker_queue_seconds{_OF}", "{{worker}}"),),
        ),
        Panel(
            "Ranks of instances that have several",
            "short",
            (
                (f"kvrs_worker_degree{_OF}", "{{worker}}"),
                (f"kvrs_worker_full_degree{_OF}", "{{worker}}, all"),
            ),
        ),
        Panel(
            "Experts on ranks: skew and copies",
            "short",
            (
                (f"kvrs_instance_expert_skew{_OF}", "skew of {{worker}}"),
                (f"kvrs_instance_expert_copies{_OF}", "copies of {{worker}}"),
            ),
        ),
        Panel(
            "Stages that are borrowed, and pages lent",
            "short",
            (
                (f"kvrs_borrowed_stages{_OF}", "stages of {{worker}}"),
                (f"kvrs_lent_pages{_OF}", "pages of {{worker}}"),
            ),
        ),
        Panel("Free KV pages", "short", ((f"kvrs_worker_free_pages{_OF}", "{{worker}}"),)),
        Panel("KV moved by kind", "Bps", _rate("kvrs_worker_kv_bytes_total", "kind")),
        Panel("Drafts by outcome", "short", _rate("kvrs_draft_tokens_total", "outcome")),
        Panel(
            "Bandwidth of links",
            "Bps",
            ((f"kvrs_link_bytes_per_second{_OF}", "{{source}} to {{target}}"),),
        ),
        Panel(
            "Checkpoints", "bytes", ((f"kvrs_agent_reserved_bytes{_OF}", "reserved at {{agent}}"),)
        ),
        Panel(
            "Pages of connectors in vLLM",
            "short",
            (
                _each_rate("kvrs_connector_pages_saved_total", "saved by"),
                _each_rate("kvrs_connector_pages_loaded_total", "loaded by"),
                _each_rate("kvrs_connector_pages_damaged_total", "damaged at"),
                (f"kvrs_connector_pinned_blocks{_OF}", "staged at {{worker}}"),
                (f"kvrs_connector_off{_OF} == 1", "off at {{worker}}"),
            ),
        ),
        Panel("Pages not sent yet", "short", ((f"kvrs_checkpoint_lag_pages{_OF}", "{{worker}}"),)),
    ],
    "Proxy": [
        Panel("CPU", "percentunit", _rate("process_cpu_seconds_total", "instance")),
        Panel(
            "Resident memory", "bytes", ((f"process_resident_memory_bytes{_OF}", "{{instance}}"),)
        ),
        Panel("Open descriptors", "short", ((f"process_open_fds{_OF}", "{{instance}}"),)),
        Panel("Peers not reached", "short", ((f"kvrs_peers_unreached{_OF}", "{{instance}}"),)),
        Panel("Lag of the event loop", "s", _quantiles("kvrs_event_loop_lag_seconds")),
        Panel("Version", "short", ((f"kvrs_build_info{_OF}", "{{version}} at {{instance}}"),)),
    ],
}

_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 7  # Of Grafana's grid, which is 24 wide.
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def alerts() -> None:
    """Print the alerting rules for Prometheus."""
    print(alert_rules(), end="")


def dashboard() -> None:
    """Print the dashboard for Grafana."""
    print(json.dumps(dashboard_json(), indent=2))


def alert_rules() -> str:
    return (files("kvrs.cli") / "data" / "alerts.yaml").read_text(encoding="utf-8")


def dashboard_json() -> dict[str, Any]:
    return {
        "title": "kvrs",
        "uid": "kvrs",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "proxy",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(kvrs_build_info, instance)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        }
        top += 1
        for at, panel in enumerate(panels):
            number += 1
            line, column = divmod(at, _COLUMNS)
            place = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(number, panel) | {"gridPos": place}
        top += -(-len(panels) // _COLUMNS) * _HEIGHT


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend}
            for at, (expression, legend) in enumerate(panel.queries)
        ],
    }
