"""Real streams through instances of several ranks, whose ranks are killed at random moments.

One cluster has decode instances of two ranks, of three and of two stages, fed by prefill of one
rank and of two, so that every page moves between degrees. Oracle: the same requests without a
fault.
"""

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.record import Record
from kvrs.cluster.launcher import Cluster
from kvrs.config.file import Config, parse_config
from kvrs.demo import run_load
from kvrs.faults.language import Fault, parse_faults
from kvrs.load.passes import Run
from kvrs.report.oracle import judge, total
from kvrs.traces.records import ReplayRequest

NODES: list[dict[str, Any]] = [
    {
        "id": "n0",
        "instances": [
            {"id": "p0", "role": "prefill", "tp": 2},
            {"id": "d0", "role": "decode", "tp": 2},
        ],
    },
    {
        "id": "n1",
        "instances": [
            {"id": "p1", "role": "prefill"},
            {"id": "d1", "role": "decode", "tp": 3},
            {"id": "d2", "role": "decode", "pp": 2},
        ],
    },
]
# The instance of stages has the second one on the other node.
ON_NODES: dict[str, Any] = {
    "id": "d2",
    "role": "decode",
    "pp": 2,
    "stage_hosts": [{"node": "n0", "port": 0}],
}
RETURN_S = 600.0


def config_of(seed: int, *, on_nodes: bool) -> Config:
    first, second = NODES
    if on_nodes:
        second = second | {"instances": [*second["instances"][:2], ON_NODES]}
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"engine": {"seed": seed, "pages": 1024}, "nodes": [first, second]},
        }
    )


def requests_of(count: int, rate: float, seed: int) -> list[ReplayRequest]:
    """Half greedy, half drawn with a seed of their own."""
    choose, at_s, requests = random.Random(seed), 0.0, []
    for index in range(count):
        at_s += choose.expovariate(rate)
        prompt = tuple(choose.randrange(2, 500) for _ in range(choose.randint(8, 200)))
        request = ReplayRequest(at_s, prompt, choose.randint(20, 120))
        if index % 2:
            request = replace(request, temperature=0.9, seed=index)
        requests.append(request)
    return requests


def kills_of(count: int, span_s: float, seed: int) -> list[Fault]:
    """At random moments, of any rank of any decode instance that works."""
    choose = random.Random(seed)
    whom = {"role": "decode", "pick": "random", "rank": "random"}
    return parse_faults(
        [
            {
                "when": {"at_s": at_s, "inflight_at_least": 1},
                "what": "kill",
                "whom": whom | {"seed": choose.randrange(1 << 30)},
            }
            for at_s in sorted(choose.uniform(0.05, 0.9) * span_s for _ in range(count))
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--on-nodes", action="store_true", help="stages on two nodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    requests = requests_of(options.requests, options.rate, options.seed)
    kills = kills_of(options.kills, requests[-1].arrival_s, options.seed)
    console = Console()
    config = config_of(options.seed, on_nodes=options.on_nodes)
    with Cluster(config, console.print) as cluster:
        killed = run_load(cluster, requests, kills, options.seed, console, "ranks are killed")
        cluster.wait_all_up(RETURN_S)
        clean = run_load(cluster, requests, [], options.seed, console, "without a fault")
    figures = figures_of(killed, clean)
    text = as_text(figures)
    print(text)
    name = "on_nodes" if options.on_nodes else "rank_kills"
    void = record.keep(options.out, name, figures, text)
    tokens = figures["tokens"]
    bad = figures["unfinished"] or any(tokens[key] for key in ("lost", "repeated", "different"))
    raise SystemExit(1 if bad or void or killed.faults_left else 0)


def figures_of(killed: Run, clean: Run) -> dict[str, Any]:
    verdicts = judge(killed.records, clean.records)
    differences = total(verdicts)
    return {
        "streams": len(killed.records),
        "unfinished": sum(not record.completed for record in killed.records),
        "verified": sum(verdict.verified for verdict in verdicts),
        "exact": sum(verdict.exact for verdict in verdicts),
        "tokens": {
            "all": sum(len(record.token_ids) for record in killed.records),
            "lost": differences.lost,
            "repeated": differences.repeated,
            "different": differences.different,
        },
        "kills": [
            {"whom": fault["whom"], "ranks": fault["ranks"], "streams": fault["streams"]}
            for fault in killed.faults
        ],
        "recoveries": len(killed.recoveries),
    }


def as_text(figures: dict[str, Any]) -> str:
    tokens = figures["tokens"]
    kills = ", ".join(
        f"{kill['whom']} rank {next(iter(kill['ranks'].values()))}" for kill in figures["kills"]
    )
    return (
        f"{figures['streams']} streams of {tokens['all']:,} tokens, {figures['unfinished']} "
        f"unfinished, {figures['exact']} exact of {figures['verified']} with a clean twin\n"
        f"tokens: {tokens['lost']} lost, {tokens['repeated']} repeated, {tokens['different']} "
        f"different\n"
        f"{len(figures['kills'])} ranks killed ({kills}); {figures['recoveries']} recoveries\n"
    )


if __name__ == "__main__":
    main()
