"""Long options of the laboratory's commands: type, bounds and help text."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvrs.cli.options import POLICIES
from kvrs_lab.sim.goals import Goal
from kvrs_lab.traces.presets import PRESETS

_MOST_REQUESTS = 1_000_000  # A generated trace has as many as it is asked for.

# Groups of the options of `kvrs lab replay`.
TRACE = "The trace, and what is done to it"
REQUESTS = "The requests"
FAULTS = "Faults, and the comparison with a run without them"
REPORT = "The report"


class StartedEngine(StrEnum):
    """Engines that `kvrs lab up` starts, among the values of `Backend`."""

    EMBEDDED = "embedded"
    DISTSERVE = "distserve"


# Limit for a cluster without a file.
MAX_NODES = 64
DemoTrace = Annotated[
    Path | None,
    typer.Option(help="A trace of a known format; lengths are scaled to the tiny model"),
]
DemoFault = Annotated[
    Path | None,
    typer.Option(help="YAML list of faults; without it, one decode instance is killed"),
]
Out = Annotated[
    Path, typer.Option(help="Directory of report.json and report.html", rich_help_panel=REPORT)
]
DemoConfig = Annotated[
    Path | None, typer.Option(help="YAML file; without it, the cluster of the demo")
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_NODES, help="Logical nodes, each with a prefill and a decode instance"
    ),
]
Pipelines = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=MAX_NODES // 2,
        help="Embedded engine: start N instances of --pp stages that can borrow each other's "
        "stages, with a node for each stage",
    ),
]
Proxies = Annotated[
    int, typer.Option(min=1, max=8, help="Number of proxies, each 10 ports above the one before it")
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Put the file's nodes on machines of this running Ray cluster"
    ),
]
Tp = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Embedded engine: ranks per stage of every instance [1]"),
]
Pp = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Embedded engine: stages of every instance [1]"),
]
Url = Annotated[str, typer.Option(help="Base of an OpenAI endpoint, such as http://127.0.0.1:8000")]
ReplayTrace = Annotated[
    Path | None,
    typer.Option(
        help="JSON or CSV, in Mooncake's or another known format, recognized by its content",
        rich_help_panel=TRACE,
    ),
]
TracePreset = Annotated[
    str | None,
    typer.Option(
        "--trace-preset",
        help=f"Or a generated trace: {', '.join(PRESETS)}",
        rich_help_panel=TRACE,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Requests per second; default: when the trace has them", rich_help_panel=TRACE
    ),
]
LengthScale = Annotated[
    float,
    typer.Option(help="Factor of all lengths; shared prefixes stay shared", rich_help_panel=TRACE),
]
ReplayModel = Annotated[
    str | None,
    typer.Option(
        help="Model name; default: the only model of the server", rich_help_panel=REQUESTS
    ),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain", help="Send neither return_token_ids nor ignore_eos", rich_help_panel=REQUESTS
    ),
]
ReplaySeed = Annotated[
    int,
    typer.Option(min=0, help="Seed of prompts and random victims", rich_help_panel=REQUESTS),
]
Oracle = Annotated[
    bool,
    typer.Option(
        "--oracle", help="Repeat without faults and compare token by token", rich_help_panel=FAULTS
    ),
]
ReplayFault = Annotated[
    Path | None, typer.Option(help="YAML list of faults; needs --admin-url", rich_help_panel=FAULTS)
]
ReplayConfig = Annotated[
    Path | None,
    typer.Option(
        help="The cluster's configuration: secret, token and certificates for faults",
        rich_help_panel=FAULTS,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MOST_REQUESTS,
        help="Number of requests to take, from the first on; default: all of the file, or 100",
        rich_help_panel=TRACE,
    ),
]
AdminUrl = Annotated[
    str | None, typer.Option(help="The proxy's admin port", rich_help_panel=FAULTS)
]
SimulateTrace = Annotated[
    Path | None,
    typer.Option(help="JSON or CSV of a known format, as for `replay`; without it, generated"),
]
SimulatedStreams = Annotated[
    int | None,
    typer.Option(
        min=1, max=_MOST_REQUESTS, help="Number of streams; default: all of the trace, or 100"
    ),
]
SimulatedRate = Annotated[
    float | None, typer.Option(help="Requests per second; default: the trace's own, or 8")
]
Jobs = Annotated[int, typer.Option(min=1, help="Processes that simulate seeds")]
SimulatedFault = Annotated[Path | None, typer.Option(help="YAML list of faults")]
RandomDeaths = Annotated[
    int, typer.Option(min=0, help="Number of random deaths, in place of --fault")
]
FirstSeed = Annotated[int, typer.Option(min=0, help="Seed of the first simulation")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of simulations, each with the next seed")]
TuneSpace = Annotated[
    Path, typer.Option(help="YAML: for each setting, by its path, a list of values or low and high")
]
TuneGoal = Annotated[Goal, typer.Option(help="Measure to improve")]
TuneTrials = Annotated[int, typer.Option(min=1, help="Number of proposals to simulate")]
TuneSeeds = Annotated[int, typer.Option(min=1, help="Simulations of each proposal")]
Compared = Annotated[
    str, typer.Option(metavar="A,B,...", help=f"Policies, separated by commas: {POLICIES}")
]
ComparedSeeds = Annotated[
    int, typer.Option(min=1, help="Number of paired runs; more make the interval narrower")
]
SimulateProxies = Annotated[
    int, typer.Option(min=1, help="Number of proxies, each with its own policy and view")
]
Files = Annotated[
    list[Path],
    typer.Argument(help="report.json, or its directory; the others are compared with the first"),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="Name of a table that comes with kvrs, or a path; without it, break-even of all"
    ),
]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of the prompt (L)")]
OutputTokens = Annotated[int, typer.Option(min=0, help="Tokens that the client already has (t)")]
Bandwidth = Annotated[
    str, typer.Option(help="Bandwidth between the nodes: 25Gbit/s, 3.1GB/s, or a link's name")
]
QueueDepth = Annotated[
    float, typer.Option(help="Requests ahead at the prefill instance beside the target")
]
CheckpointTokens = Annotated[
    int, typer.Option(min=0, help="Tokens of prompt and output whose KV an agent holds")
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--fetches-pages",
        help="Instances have a prefix cache alone, or fetch pages of others and split; default: as "
        "the profile's engine (vLLM: prefix cache)",
    ),
]
ReplayedLog = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="EVENTLOG",
        help="Event log of a proxy, whose decisions are made once more under --set",
    ),
]
Changed = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="policy.KEY=VALUE",
        help="With --replay: a setting that the log's incidents are decided by; repeatable",
    ),
]
