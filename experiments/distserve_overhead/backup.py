"""The cost of checkpoints to undisturbed streams of DistServe, by kind of process.

    DISTSERVE_HOME=... python -m experiments.distserve_overhead.backup [--rounds 64]

The same servers, agents and streams behind a proxy for each `backup.mode`, in turns; CPU time by
kind of process, and the client's times between tokens.
"""

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop
from rich.progress import Progress

from experiments.distserve_overhead.run import drift
from experiments.distserve_servers import DistServeServers, check_option
from experiments.record import Record
from experiments.rig import draw, interval, session_for
from kvrs.cluster.ports import resolve_ports
from kvrs.config.backup import BackupMode
from kvrs.config.file import Config, parse_config
from kvrs.load.passes import Target, run_pass
from kvrs.protocol.instance import InstanceInfo
from kvrs.report.metrics import tpot_s
from kvrs.traces.records import ReplayRequest
from kvrs_testkit.processes import nodes_with_pairs, threads_of

STREAMS = 8
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 192
MOST_DRIFT = 0.05
MOST_SPREAD = 0.05  # Of the cost: half of its interval.
LOOPS = "servers: event loop"
THREADS = "servers: other threads"
DECODING, CONTEXT = "decoding workers", "context workers"
RAY, AGENTS, PROXY = "Ray's own processes", "agents", "proxy"
KINDS = (LOOPS, THREADS, DECODING, CONTEXT, RAY, AGENTS, PROXY)
PACE = "token_s"


def settings() -> Config:
    """Two servers with one prefill and two decode workers each, as in distserve_kill_series."""
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {
                "backend": "distserve",
                "distserve": {"flags": ["--decoding-tensor-parallel-size", "2"]},
                "nodes": nodes_with_pairs(),
            },
            "transfer": {"probe_interval_s": 3600.0},
            "backup": {"mode": "both", "capacity_bytes": 64 << 20},
        }
    )


def proxy_of(config: Config, mode: BackupMode) -> Config:
    document = config.model_dump(mode="json")
    document["backup"]["mode"] = mode.value
    own = resolve_ports(parse_config({"proxy": {"port": 0, "admin_port": 0}})).proxy
    document["proxy"] |= {"port": own.port, "admin_port": own.admin_port}
    return parse_config(document)


class Cpu:
    """CPU time of all processes of the cluster, by kind."""

    def __init__(self, processes: DistServeServers, infos: Sequence[InstanceInfo]) -> None:
        self._kinds: dict[int, str] = {}
        roles = {pid: info.role.value for info in infos for pid in info.worker_pids}
        nodes = processes.config.cluster.nodes
        self._servers = [processes.pid(node.instances[0].id) for node in nodes]
        for server in self._servers:
            for child in psutil.Process(server).children(recursive=True):
                role = roles.get(child.pid)
                self._kinds[child.pid] = (
                    RAY if role is None else CONTEXT if role == "prefill" else DECODING
                )
        for node in nodes:
            self._kinds[processes.pid(node.agent_id)] = AGENTS

    def read(self, proxy: int) -> dict[str, float]:
        """Seconds since the processes began."""
        seconds = dict.fromkeys(KINDS, 0.0)
        for pid, kind in (*self._kinds.items(), (proxy, PROXY)):
            seconds[kind] += sum(spent.running_s for spent in threads_of(pid).values())
        for server in self._servers:
            for thread, spent in threads_of(server).items():
                seconds[LOOPS if thread == server else THREADS] += spent.running_s
        return seconds


async def _infos(processes: DistServeServers) -> list[InstanceInfo]:
    found = []
    async with session_for(processes) as session:
        for _, instance in processes.config.cluster.instances():
            async with session.get(f"{instance.url}/kvrs/v1/instance") as answer:
                answer.raise_for_status()
                found.append(msgspec.json.decode(await answer.read(), type=InstanceInfo))
    return found


def round_of(url: str, rng: random.Random, seed: int) -> list[float]:
    """The same load whatever the mode; the time per token of each stream."""
    asked = [
        ReplayRequest(0.0, tuple(draw(rng, PROMPT_TOKENS)), OUTPUT_TOKENS) for _ in range(STREAMS)
    ]
    records = uvloop.run(run_pass(Target(url), asked, [], seed)).records
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise SystemExit(f"a stream failed: {failed[0]}")
    return [each for record in records if (each := tpot_s(record)) is not None]


def measure(
    processes: DistServeServers,
    modes: Sequence[BackupMode],
    warm_up: int,
    rounds: int,
    seed: int,
) -> dict[str, dict[str, list[float]]]:
    """By mode, then by kind: CPU seconds per token of each round, and the client's time per
    token.
    """
    order, prompts = random.Random(seed), random.Random(seed)
    urls, pids = {}, {}
    for mode in modes:
        config = proxy_of(processes.config, mode)
        processes.start_proxy(config, f"proxy-{mode.value}")
        urls[mode] = f"http://{config.proxy.host}:{config.proxy.port}"
        pids[mode] = processes.pid(f"proxy-{mode.value}")
    cpu = Cpu(processes, asyncio.run(_infos(processes)))
    samples: dict[str, dict[str, list[float]]] = {
        mode.value: {name: [] for name in (*KINDS, PACE)} for mode in modes
    }
    with Progress(disable=not sys.stderr.isatty()) as progress:
        for number in progress.track(range(warm_up + rounds), description="rounds"):
            for mode in order.sample(list(modes), len(modes)):
                before = cpu.read(pids[mode])
                tpots_s = round_of(urls[mode], prompts, seed)
                after = cpu.read(pids[mode])
                if number < warm_up:
                    continue
                found = samples[mode.value]
                for kind in KINDS:
                    found[kind].append((after[kind] - before[kind]) / (STREAMS * OUTPUT_TOKENS))
                found[PACE].append(statistics.median(tpots_s))
    return samples


def more(
    samples: dict[str, dict[str, list[float]]], mode: str, names: Sequence[str]
) -> list[float]:
    """The extra cost of this mode over `off`, as a share, of each round's pair."""
    plain, other = (
        [sum(each) for each in zip(*(samples[way][name] for name in names), strict=True)]
        for way in (BackupMode.OFF.value, mode)
    )
    return [b / a - 1 for a, b in zip(plain, other, strict=True)]


def costs(
    samples: dict[str, dict[str, list[float]]], mode: str, names: Sequence[str]
) -> tuple[float, float]:
    """Median of `more`, and half of its interval."""
    ratios = more(samples, mode, names)
    return statistics.median(ratios), interval(ratios)


def as_text(samples: dict[str, dict[str, list[float]]], rounds: int) -> str:
    modes = [*samples]
    lines = [
        f"checkpoints of undisturbed streams, {rounds} interleaved rounds, medians; {STREAMS} "
        f"streams a round, prompts of {PROMPT_TOKENS} tokens, outputs of {OUTPUT_TOKENS}",
        "",
        f"{'CPU, us per token':<24}" + "".join(f"{mode:>10}" for mode in modes),
    ]

    def row(name: str, names: Sequence[str], unit: float) -> str:
        values = (
            statistics.median(map(sum, zip(*(found[each] for each in names), strict=True)))
            for found in samples.values()
        )
        return f"{name:<24}" + "".join(f"{value * unit:>10.1f}" for value in values)

    lines += [row(kind, [kind], 1e6) for kind in KINDS]
    lines += [row("all", KINDS, 1e6), row("ms per token", [PACE], 1e3), ""]
    for mode in modes[1:]:
        cpu, pace = (
            "{:+.1%} ± {:.1%}".format(*costs(samples, mode, names)) for names in (KINDS, [PACE])
        )
        lines.append(f"{mode}: CPU {cpu}, time per token {pace}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=4, help="rounds of each that do not count")
    parser.add_argument(
        "--modes",
        type=BackupMode,
        nargs="+",
        choices=[BackupMode.LOCAL, BackupMode.REMOTE, BackupMode.BOTH],
        default=[BackupMode.LOCAL, BackupMode.BOTH],
        help="beside off",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    check_option(parser, distserve=True)
    record = Record(arguments.seed)
    modes = [BackupMode.OFF, *arguments.modes]
    with DistServeServers(settings()) as processes:
        nodes = processes.config.cluster.nodes
        names = [instance.id for node in nodes for instance in node.instances]
        agents = [str(node.agent_id) for node in nodes]
        processes.start(*names, *agents)
        processes.wait_ready(*names, *agents)
        samples = measure(processes, modes, arguments.warm_up, arguments.rounds, arguments.seed)
    text = as_text(samples, arguments.rounds)
    print(text, end="")
    result: dict[str, Any] = {
        "rounds": arguments.rounds,
        "warm_up_rounds": arguments.warm_up,
        "streams": STREAMS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "samples_s": samples,
    }
    for mode in [*samples][1:]:
        cost, spread = costs(samples, mode, KINDS)
        result[f"{mode}_cpu_cost"], result[f"{mode}_cpu_cost_interval"] = cost, spread
        if abs(moved := drift(more(samples, mode, KINDS))) > MOST_DRIFT:
            record.void(f"{mode}: later pairs differ from earlier ones by {moved:+.1%}")
        if spread > MOST_SPREAD:
            record.void(f"{mode}: the interval is wider than {MOST_SPREAD:.0%}")
    return 2 if record.keep(arguments.out, "backup", result, text) else 0


if __name__ == "__main__":
    raise SystemExit(main())
