"""Goodput when most requests come in at one of two nodes: hand-offs that stay, against hand-offs
that may go to the other node.

    python -m experiments.load_skew.run [--shares 50 60 70 80 90] [--repeats 2] [--seconds 40]
                                        [--distserve]

Seed KVRS, load skew: static intra-node hand-off against `rom` and `auto`. Two proxies are the two
front doors; each sends its prompts to its own node's prefill instance, and both may use both decode
instances. With `--distserve` each node is a server of DistServe with the same clock.
"""

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import uvloop
from rich.progress import Progress

from experiments.command_line import parser_of
from experiments.distserve_servers import add_option, check_option, processes_for
from experiments.record import Record
from experiments.rig import draw
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import Handoff
from kvrs.profiles import catalog
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_lab.load.passes import Target, run_pass
from kvrs_lab.report.metrics import Slo, meets, percentile, ttft_s
from kvrs_lab.traces.records import ReplayRequest, StreamRecord
from kvrs_testkit.processes import Processes, cpu_ticks, nodes_with_pairs, share_used

PROFILE = "opt-13b-a100-distserve-tp1"
GBIT_PER_S = 25.0
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 60
# A decode instance runs eight streams of about 1.3 s each: 6 requests a second. Both are offered
# half of what they can do.
MAX_RUNNING = 8
REQUESTS_PER_S = 6.5
SLO = Slo(ttft_s=0.5, tpot_s=0.05)
KV_BYTES_PER_TOKEN = 2048  # Of the tiny model.
MOST_CPU = 0.85


def settings(*, distserve: bool = False) -> Config:
    shrink = KV_BYTES_PER_TOKEN / catalog.kv_geometry(PROFILE).bytes_per_token
    cluster: dict[str, Any] = {"engine": {"pace": PROFILE}, "nodes": nodes_with_pairs()}
    if distserve:
        flags = ["--decoding-max-batch-size", str(MAX_RUNNING)]
        cluster |= {"backend": "distserve", "distserve": {"flags": flags}}
    else:
        cluster["engine"] |= {"max_batch_tokens": 512, "max_running": MAX_RUNNING}
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0, "load_interval_s": 0.1},
            "cluster": cluster,
            "transfer": {"link_bytes_per_s": GBIT_PER_S / 8 * 1e9 * shrink},
        }
    )


def behind_door(config: Config, node: int, handoff: Handoff) -> dict[str, Any]:
    """The configuration of one node's proxy: its own pair, and with hand-offs that may leave it the
    other decode instances too.
    """
    document = config.model_dump(mode="json")
    nodes = document["cluster"]["nodes"]
    if handoff is Handoff.OWN_PAIR:
        document["cluster"]["nodes"] = nodes[node : node + 1]
    else:
        other = nodes[1 - node]
        other["instances"] = [each for each in other["instances"] if each["role"] == "decode"]
    document["policy"]["handoff"] = handoff.value
    return document


def front_door(config: Config, node: int, handoff: Handoff) -> Config:
    document = behind_door(config, node, handoff)
    # The instances have their ports already.
    own = resolve_ports(parse_config({"proxy": {"port": 0, "admin_port": 0}})).proxy
    document["proxy"] |= {"port": own.port, "admin_port": own.admin_port}
    return parse_config(document)


def requests(
    seed: int, seconds: float, share: float, rate: float = REQUESTS_PER_S
) -> tuple[list[ReplayRequest], list[ReplayRequest]]:
    """Poisson arrivals, each at the busy node with the given chance."""
    rng = random.Random(seed)
    doors: tuple[list[ReplayRequest], list[ReplayRequest]] = ([], [])
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        request = ReplayRequest(at_s, tuple(draw(rng, PROMPT_TOKENS)), OUTPUT_TOKENS)
        doors[0 if rng.random() < share else 1].append(request)
        at_s += rng.expovariate(rate)
    return doors


def start(
    processes: Processes, modes: Sequence[Handoff] = tuple(Handoff)
) -> dict[Handoff, list[str]]:
    """The instances, and two proxies for each way to hand off; the addresses of these."""
    names = [instance.id for _, instance in processes.config.cluster.instances()]
    processes.start(*names)
    processes.wait_ready(*names)
    urls: dict[Handoff, list[str]] = {mode: [] for mode in modes}
    for mode in modes:
        for node in range(2):
            door = front_door(processes.config, node, mode)
            processes.start_proxy(door, f"proxy-{mode.value}-{node}")
            urls[mode].append(f"http://{door.proxy.host}:{door.proxy.port}")
    return urls


async def load(
    urls: list[str], doors: tuple[list[ReplayRequest], list[ReplayRequest]], seed: int
) -> list[StreamRecord]:
    passes = [
        run_pass(Target(url), asked, [], seed)
        for url, asked in zip(urls, doors, strict=True)
        if asked
    ]
    return [record for run in await asyncio.gather(*passes) for record in run.records]


def figures(records: list[StreamRecord], seconds: float) -> dict[str, Any]:
    waits_s = [wait_s for record in records if (wait_s := ttft_s(record)) is not None]
    good = sum(meets(record, SLO) for record in records)
    return {
        "requests": len(records),
        "errors": sum(record.error is not None for record in records),
        "good": good,
        "goodput_per_s": good / seconds,
        "ttft_p50_s": percentile(waits_s, 50),
        "ttft_p99_s": percentile(waits_s, 99),
    }


def as_text(rows: dict[str, dict[str, list[dict[str, Any]]]], result: dict[str, Any]) -> str:
    lines = [
        f"goodput (TTFT {SLO.ttft_s} s, TPOT {SLO.tpot_s} s) of {REQUESTS_PER_S:g} "
        f"requests/s, {result['engine']}, {PROFILE}, {GBIT_PER_S:g} Gbit/s; "
        f"{result['repeats']} runs of {result['seconds']:g} s each, in turns",
        f"CPU in use {result['cpu_share']:.0%} (void above {MOST_CPU:.0%})",
        "",
        f"{'at n0':>6}"
        + "".join(f"{mode + ' /s':>14}{'TTFT p99':>10}" for mode in rows)
        + f"{'rom gains':>11}{'auto gains':>11}",
    ]
    for share in result["shares"]:
        cells = {mode: found[str(share)] for mode, found in rows.items()}
        goodput = {
            mode: statistics.mean(run["goodput_per_s"] for run in runs)
            for mode, runs in cells.items()
        }
        text = f"{share:>5} %"
        for mode, runs in cells.items():
            text += (
                f"{goodput[mode]:>14.2f}{statistics.mean(run['ttft_p99_s'] for run in runs):>10.2f}"
            )
        own = goodput[Handoff.OWN_PAIR.value]
        lines.append(
            text
            + "".join(
                f"{goodput[mode.value] / own - 1:>11.1%}" for mode in (Handoff.ROM, Handoff.AUTO)
            )
        )
    lines += ["", "the seed reports +8.6 % for `rom` at 90 %"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--shares", type=int, nargs="+", default=[50, 60, 70, 80, 90])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0)
    add_option(parser)
    arguments = parser.parse_args()
    check_option(parser, distserve=arguments.distserve)
    record = Record(arguments.seed)
    order = random.Random(arguments.seed)
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {
        mode.value: {str(share): [] for share in arguments.shares} for mode in Handoff
    }
    with processes_for(settings(distserve=arguments.distserve)) as processes:
        urls = start(processes)
        before = cpu_ticks()
        with Progress(disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task(
                "runs", total=arguments.repeats * len(arguments.shares) * len(Handoff)
            )
            for repeat in range(arguments.repeats):
                for share in order.sample(arguments.shares, len(arguments.shares)):
                    asked = requests(arguments.seed + repeat, arguments.seconds, share / 100)
                    for mode in order.sample(list(Handoff), len(Handoff)):
                        records = uvloop.run(load(urls[mode], asked, arguments.seed))
                        rows[mode.value][str(share)].append(figures(records, arguments.seconds))
                        progress.advance(task)
        cpu = share_used(before, cpu_ticks())
    result: dict[str, Any] = {
        "profile": PROFILE,
        "engine": "DistServe" if arguments.distserve else "embedded",
        "gbit_per_s": GBIT_PER_S,
        "requests_per_s": REQUESTS_PER_S,
        "shares": arguments.shares,
        "repeats": arguments.repeats,
        "seconds": arguments.seconds,
        "cpu_share": round(cpu, 3),
    }
    text = as_text(rows, result)
    print(text, end="")
    record.check_cpu(cpu, MOST_CPU)
    name = "distserve" if arguments.distserve else "load_skew"
    is_void = record.keep(arguments.out, name, {**result, "rows": rows}, text)
    return 2 if is_void else 0


if __name__ == "__main__":
    sys.exit(main())
