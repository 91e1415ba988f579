"""Prompts with common beginnings at real engines, placed by load and by prefix, beside the same
requests in the simulator; and the death of the instance that most of the hits are at.

    python -m experiments.prefix_placement.engines [--repeats 3] [--seconds 30] [--out DIR]

Embedded engines with a tiny model in processes of their own keep another GPU's clock by sleeping.
Exit status 1: a bar is missed.
"""

import asyncio
import json
import random
import sys
import urllib.request
from array import array
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import uvloop

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import Rig, draw, session_for
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import Route
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_lab.load.passes import Target, run_pass
from kvrs_lab.report.metrics import ttft_s
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.records import ReplayRequest, StreamRecord
from kvrs_testkit.processes import Processes, cpu_ticks, share_used

PROFILE = "opt-13b-a100-distserve-tp1"
PREFILLS, DECODES = ("p0", "p1", "p2", "p3"), ("d0", "d1")
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 16, 768, 64, 4
REQUESTS_PER_S = 7.0
LINK_BYTES_PER_S = 50e9
MOST_OFF = 0.25  # Of the simulated time to the first token.
MOST_CPU = 0.85


def settings() -> Config:
    nodes = []
    for number, prefill in enumerate(PREFILLS):
        instances = [{"id": prefill, "role": "prefill"}]
        if number < len(DECODES):
            instances.append({"id": DECODES[number], "role": "decode"})
        nodes.append({"id": f"n{number}", "instances": instances})
    engine = {"pace": PROFILE, "max_batch_tokens": 512, "max_running": 64}
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"engine": engine, "nodes": nodes},
            "backup": {"mode": "off"},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S},
        }
    )


def with_route(config: Config, route: Route) -> Config:
    """The proxy that places prompts so, with ports of its own."""
    own = resolve_ports(parse_config({"proxy": {"port": 0, "admin_port": 0}})).proxy
    document = config.model_dump(mode="json")
    document["policy"]["route"] = route.value
    document["proxy"] |= {"port": own.port, "admin_port": own.admin_port}
    return parse_config(document)


def requests(seed: int, seconds: float) -> list[ReplayRequest]:
    """Questions about documents, in Poisson arrivals."""
    rng = random.Random(seed)
    documents = [draw(rng, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    found, at_s = [], rng.expovariate(REQUESTS_PER_S)
    while at_s < seconds:
        prompt = (*rng.choice(documents), *draw(rng, QUESTION_TOKENS))
        found.append(ReplayRequest(at_s, prompt, OUTPUT_TOKENS))
        at_s += rng.expovariate(REQUESTS_PER_S)
    return found


def simulated(config: Config, asked: Sequence[ReplayRequest], seed: int) -> dict[str, float]:
    arrivals = [
        Arrival(each.arrival_s, array("H", each.prompt_ids), each.max_tokens) for each in asked
    ]
    world = World(config, arrivals, [], seed=seed)
    outcome = world.run()
    streams = (live for proxy in world.cluster.proxies for live in proxy.streams.values())
    waits_s = [live.journal.received_s[0] - live.arrival.at_s for live in streams]
    return {"ttft_s": fmean(waits_s), "hits": outcome.cached_tokens / outcome.prompt_tokens}


class Cluster:
    """Real engines, with a proxy for each way to place prompts."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._names = [each.id for _, each in processes.config.cluster.instances()]
        processes.start(*self._names)
        processes.wait_ready(*self._names)
        self._doors = {route: with_route(processes.config, route) for route in Route}
        for route, door in self._doors.items():
            processes.start_proxy(door, f"proxy-{route.value}")

    def run(
        self, route: Route, asked: list[ReplayRequest], seed: int, kill_at_s: float | None = None
    ) -> tuple[list[StreamRecord], dict[str, tuple[int, int]]]:
        """Run a load on empty caches; its records, and the prompt and cached tokens by instance.
        The instance that most tokens were found at by then is killed at `kill_at_s`.
        """
        return uvloop.run(self._run(route, asked, seed, kill_at_s))

    async def _run(
        self, route: Route, asked: list[ReplayRequest], seed: int, kill_at_s: float | None
    ) -> tuple[list[StreamRecord], dict[str, tuple[int, int]]]:
        async with session_for(self._processes) as session:
            rig = Rig(self._processes, session, PROFILE)
            await rig.meet()
            await rig.empty(*self._names)
        door = self._doors[route].proxy
        before = self._hits(route)
        load = asyncio.create_task(
            run_pass(Target(f"http://{door.host}:{door.port}"), asked, [], seed)
        )
        if kill_at_s is not None:
            await asyncio.sleep(kill_at_s)
            found = _since(before, self._hits(route))
            victim = max(found, key=lambda name: found[name][1])
            self._processes.kill(victim)
        run = await load
        found = _since(before, self._hits(route))
        if kill_at_s is not None:
            self._processes.start(victim)
            self._processes.wait_ready(victim)
        return run.records, found

    def _hits(self, route: Route) -> dict[str, tuple[int, int]]:
        door = self._doors[route].proxy
        url = f"http://{door.admin_host}:{door.admin_port}/kvrs/v1/state"
        with urllib.request.urlopen(url, timeout=10) as answer:
            rows = json.loads(answer.read())["instances"]
        return {
            row["id"]: (row["prefix_hits"]["prompt_tokens"], row["prefix_hits"]["cached_tokens"])
            for row in rows
            if row["prefix_hits"] is not None
        }


def _since(
    before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    found = {}
    for name, (prompt, cached) in now.items():
        prompt_before, cached_before = before.get(name, (0, 0))
        found[name] = prompt - prompt_before, cached - cached_before
    return found


def figures(records: list[StreamRecord], hits: dict[str, tuple[int, int]]) -> dict[str, float]:
    waits_s = [wait_s for each in records if (wait_s := ttft_s(each)) is not None]
    prompt, cached = (sum(each[part] for each in hits.values()) for part in (0, 1))
    return {
        "ttft_s": fmean(waits_s),
        "hits": cached / prompt,
        "errors": sum(each.error is not None for each in records),
    }


def measure(options: Any) -> dict[str, Any]:
    rows: dict[str, list[dict[str, Any]]] = {route.value: [] for route in Route}
    deaths = []
    with Processes(settings()) as processes:
        cluster = Cluster(processes)
        for repeat in range(options.repeats):
            seed = options.seed + repeat
            asked = requests(seed, options.seconds)
            whole: list[StreamRecord] = []
            for route in random.Random(seed).sample(list(Route), len(Route)):
                records, hits = cluster.run(route, asked, seed)
                predicted = simulated(with_route(settings(), route), asked, seed)
                rows[route.value].append({"real": figures(records, hits), "simulated": predicted})
                whole = records
                print(f"repeat {repeat + 1}: {route.value}", rows[route.value][-1], flush=True)
            records, hits = cluster.run(Route.PREFIX, asked, seed, options.seconds / 2)
            deaths.append(
                figures(records, hits)
                | {
                    "requests": len(records),
                    "different": sum(
                        one.token_ids != other.token_ids
                        for one, other in zip(records, whole, strict=True)
                    ),
                }
            )
            print(f"repeat {repeat + 1}: a death", deaths[-1], flush=True)
    return {"rows": rows, "deaths": deaths}


def as_text(found: dict[str, Any]) -> tuple[str, bool]:
    lines = [
        f"{'':10}{'TTFT, real':>12}{'simulated':>11}{'off by':>8}"
        f"{'hits, real':>12}{'simulated':>11}"
    ]
    is_met = True
    for route, runs in found["rows"].items():
        real, predicted = (
            fmean(run[kind]["ttft_s"] for run in runs) for kind in ("real", "simulated")
        )
        shares = [fmean(run[kind]["hits"] for run in runs) for kind in ("real", "simulated")]
        off = real / predicted - 1
        is_met = is_met and abs(off) <= MOST_OFF
        lines.append(
            f"{route:10}{1000 * real:>9.0f} ms{1000 * predicted:>8.0f} ms{off:>8.0%}"
            f"{shares[0]:>12.1%}{shares[1]:>11.1%}"
        )
    deaths = found["deaths"]
    asked, different, errors = (
        sum(each[name] for each in deaths) for name in ("requests", "different", "errors")
    )
    is_met = is_met and not different and not errors
    lines += [
        "",
        f"{len(deaths)} deaths of the instance with most hits, by prefix: of {asked} streams "
        f"{different} differ, {errors} ended with an error; "
        f"TTFT {1000 * fmean(each['ttft_s'] for each in deaths):.0f} ms, "
        f"hits {fmean(each['hits'] for each in deaths):.1%}",
        f"bars: off by at most {MOST_OFF:.0%}; none differs",
    ]
    return "\n".join(lines), is_met


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    record = Record(options.seed)
    before = cpu_ticks()
    found = measure(options)
    cpu = share_used(before, cpu_ticks())
    text, is_met = as_text(found)
    text += f"\nCPU in use {cpu:.0%} (void above {MOST_CPU:.0%})"
    print(text)
    record.check_cpu(cpu, MOST_CPU)
    is_void = record.keep(options.out, "engines", {**found, "cpu_share": round(cpu, 3)}, text)
    return 2 if is_void else int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
