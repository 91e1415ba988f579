"""`kvrs lab demo`: kill a decode instance and later a node under load, and compare with a run
without faults.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from kvrs.config.backup import BackupMode
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName
from kvrs.errors import ConfigError
from kvrs.net.tls import load_certificates
from kvrs.tables import output
from kvrs_lab.cluster.fault_injection import (
    check_faults,
    inject_faults,
    members_of,
    unknown_victims,
)
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.faults.language import Fault, load_faults, parse_faults
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.open_loop import Progress
from kvrs_lab.load.pace import PaceWatch
from kvrs_lab.load.passes import Run, Target, run_pass
from kvrs_lab.load.progress import progress_bar
from kvrs_lab.report.html import write_html
from kvrs_lab.report.output import claim_directory
from kvrs_lab.report.pace import pace_of
from kvrs_lab.report.report import Report, build_report, write_report
from kvrs_lab.report.table import terminal_table
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.generator import GeneratorSettings, generate
from kvrs_lab.traces.mooncake import Trace, at_rate, jitter, replay_requests, scale, window
from kvrs_lab.traces.records import ReplayRequest

# The pace of a 66-billion-parameter model on two GPUs, whose steps two cores keep with the tiny
# model: a prediction is of the profile. At full speed on shared cores the survivors of a kill would
# run faster than before, and streams of a tiny model would end too early.
PACE = "opt-66b-a100-distserve-tp2"
MAX_INPUT_TOKENS = 480
MAX_OUTPUT_TOKENS = 240
REQUESTS_PER_S = 4.0
VOCAB_SIZE = 512
FIRST_ORDINARY_TOKEN = 4
# The transfer of a few prompts takes as long as computing one, so that both are chosen.
LINK_BYTES_PER_S = 12e6
# Memory of each agent: checkpoints of some streams of the other node. The others have only the KV
# that prefill instances retain, or none.
BACKUP_BYTES = 2 << 20
# The deaths of a node's processes reach the proxy within this time, on two cores that are busy.
GATHER_S = 0.1

LEAST_STREAMS = 8  # Some may have ended, or still be in prefill, when the signal comes.
# Fewer requests may put that many streams on no instance: two instances share them.
FEWEST_REQUESTS = 40
RETURN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    policy: PolicyName
    requests: int
    trace: Path | None
    fault: Path | None
    out: Path
    seed: int = 0  # For the model, the trace and the victims.


def run_demo(options: DemoOptions) -> bool:
    """Run the demo and write its report; return whether every stream was exact.

    Raises:
        ConfigError, TraceError: a file is wrong; nothing was started.
    """
    console = output()
    if options.fault is None and options.requests < FEWEST_REQUESTS:
        allowed = (
            f"at least {FEWEST_REQUESTS}, or a --fault of your own (the demo's wait for "
            f"{LEAST_STREAMS} streams at one instance)"
        )
        raise ConfigError(f"--requests: got {options.requests}; allowed: {allowed}")
    config = demo_config(options.policy, options.seed)
    faults = (
        default_faults(options.requests) if options.fault is None else load_faults(options.fault)
    )
    if mistakes := unknown_victims(faults, members_of(config)):
        raise ConfigError([f"{options.fault}: {line}" for line in mistakes])
    requests = _requests(options)
    claim_directory(options.out)
    pace = PaceWatch(PACE)
    with Cluster(
        config, lambda line: console.print(f"  {line}", style="dim", markup=False)
    ) as cluster:
        faulted = run_load(
            cluster, requests, faults, options.seed, console, "with the faults", pace=pace
        )
        back_s = cluster.wait_all_up(RETURN_TIMEOUT_S)
        console.print(f"  all instances are up {back_s:.1f} s after the last stream", style="dim")
        clean = run_load(cluster, requests, [], options.seed, console, "without")
        cluster.keep_logs(options.out / "logs")
    report = _report(options, config, faulted, clean)
    report["machine"]["pace"] = pace_of(PACE, pace.decodes, pace.prompts)
    _write(report, options.out, console)
    return bool(report["exact"]) and not faulted.faults_left


def run_load(
    cluster: Cluster,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    console: Console,
    title: str,
    timeout_s: float = 300.0,
    pace: PaceWatch | None = None,
) -> Run:
    """Replay the requests through the proxy on an empty cache, and carry out the due faults. A
    request that takes longer than `timeout_s` fails. `pace` notes the steps of the instances.

    Raises:
        ConfigError: a fault has an unknown victim, or its victim refuses.
        FaultError: a fault could not be carried out.
    """

    async def run(show: Callable[[Progress], None]) -> Run:
        tls = load_certificates("security.tls", cluster.config.security.tls)
        async with AdminPort(cluster.proxies[0].admin, cluster.secret, tls) as port:
            await check_faults(faults, port)
            target = Target(
                cluster.url, timeout_s=timeout_s, port=port, inject_faults=inject_faults
            )
            load = run_pass(target, requests, faults, seed, show)
            return await load if pace is None else await _watched(load, pace, port)

    with progress_bar(console, title, len(requests)) as show:
        return uvloop.run(run(show))


async def _watched(load: Coroutine[Any, Any, Run], pace: PaceWatch, port: AdminPort) -> Run:
    watch = asyncio.create_task(pace.watch(port))
    try:
        return await load
    finally:
        watch.cancel()
        # After an error of the watch, the factors that it has read before still count.
        await asyncio.gather(watch, return_exceptions=True)


def default_faults(requests: int) -> list[Fault]:
    """A process dies, later a node with all that it held. By then the process is back."""
    return parse_faults(
        [
            {"when": {"inflight_at_least": LEAST_STREAMS}, "what": "kill", "whom": {"id": "d0"}},
            {
                "when": {"after_requests": 3 * requests // 4, "streams_at_least": LEAST_STREAMS},
                "what": "kill",
                "whom": {"node": "n1"},
            },
        ]
    )


def demo_config(policy: PolicyName, seed: int) -> Config:
    """Two nodes with a prefill and a decode instance each, a slow link, and any free ports."""
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"engine": {"seed": seed, "pace": PACE}, "allow_faults": True},
            "policy": {"name": policy.value, "recovery": {"gather_s": GATHER_S}},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S, "probe_interval_s": 1.0},
            "backup": {"mode": BackupMode.REMOTE.value, "capacity_bytes": BACKUP_BYTES},
        }
    )


def _requests(options: DemoOptions) -> list[ReplayRequest]:
    if options.trace is None:
        trace = generate(GeneratorSettings(requests=options.requests), options.seed)
    else:
        # Mooncake logged arrivals in batches of 3 s.
        trace = jitter(window(load_trace(options.trace), options.requests), 3.0, options.seed)
    return scaled_requests(trace, options.seed)


def scaled_requests(
    trace: Trace, seed: int, requests_per_s: float = REQUESTS_PER_S
) -> list[ReplayRequest]:
    """Scale the trace to the tiny model, at a rate at which its streams overlap."""
    # The few longest prompts are cut; otherwise all others would shrink to a handful of tokens.
    longest = sorted(request.input_tokens for request in trace.requests)[
        int(0.9 * (len(trace.requests) - 1))
    ]
    small = scale(trace, MAX_INPUT_TOKENS, MAX_OUTPUT_TOKENS, longest_input_tokens=longest)
    return replay_requests(at_rate(small, requests_per_s), VOCAB_SIZE, seed, FIRST_ORDINARY_TOKEN)


def _report(options: DemoOptions, config: Config, faulted: Run, clean: Run) -> Report:
    settings = {
        "policy": options.policy.value,
        "requests": options.requests,
        "trace": options.trace.name if options.trace else "generated",
        "seed": options.seed,
        "pace": PACE,
        "link_bytes_per_s": config.transfer.link_bytes_per_s,
        "nodes": len(config.cluster.nodes),
        "backup": config.backup.mode.value,
    }
    never_due = [fault.label for fault in faulted.never_due]
    return build_report(
        faulted.records,
        clean.records,
        faulted.recoveries,
        faulted.faults,
        settings,
        never_due=never_due,
        proxy=faulted.proxy,
        cpu_pressures=[faulted.cpu_pressure, clean.cpu_pressure],
        losses=faulted.losses,
    )


def _write(report: Report, out: Path, console: Console) -> None:
    write_report(report, out / "report.json")
    write_html(report, out / "report.html")
    console.print(terminal_table(report))
    console.print(
        f"\nreport: {out / 'report.html'} and {out / 'report.json'}", markup=False, soft_wrap=True
    )
