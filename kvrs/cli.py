"""The command line. Each command checks its input, then hands over to the package that does the work."""

import os
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from kvrs.cluster.config import Backend
from kvrs.config import ENV_NAME, Config, SecuritySettings, demo_nodes, load_config, parse_config, read_secret, read_secrets
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import NodeId
from kvrs.policy.config import PolicyName
from kvrs.policy.explain import CheckpointAt
from kvrs.replay.records import Api

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__import__("kvrs").__doc__)
config_app = typer.Typer(no_args_is_help=True, help="Work with configuration files.")
app.add_typer(config_app, name="config")

INTERRUPTED = 130  # The exit status of whatever Ctrl-C has ended.

console = Console(stderr=True, highlight=False)

ConfigFile = Annotated[Path, typer.Option("--config", help="YAML file; docs/kvrs.example.yaml has every key")]


def main() -> None:
    """Run the command line; what the user did wrong is said in plain lines and ends with status 2."""
    try:
        app()
    except KvrsError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            console.print("interrupted", style="yellow")
        raise


@app.command()
def demo(
    policy: Annotated[PolicyName, typer.Option(help="How victims are recovered")] = PolicyName.AUTO,
    requests: Annotated[int, typer.Option(min=1, max=2000, help="How many streams to replay")] = 60,
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake JSONL, Azure or BurstGPT CSV; lengths are scaled to the tiny model")
    ] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Count a trace's bad lines, go on without them")
    ] = False,
    fault: Annotated[Path | None, typer.Option(help="YAML list of faults; without it, one decode instance is killed")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the model, the trace and the choice of victims")] = 0,
    out: Annotated[Path, typer.Option(help="Where report.json and report.html go")] = Path("out/demo"),
) -> None:
    """Start a real cluster, kill a decode instance under load, and prove that no stream lost or repeated a token."""
    from kvrs.demo import DemoOptions, run_demo

    options = DemoOptions(
        policy=policy, requests=requests, trace=trace, skip_bad_lines=skip_bad_lines, fault=fault, seed=seed, out=out
    )
    raise typer.Exit(0 if run_demo(options) else 1)


@app.command()
def up(
    config: Annotated[Path | None, typer.Option(help="YAML file; without it, the cluster of the demo")] = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory; without it, a tiny random model")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, max=64, help="Logical nodes, one prefill and one decode each")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="What clients talk to [8000]")] = None,
    admin_port: Annotated[int | None, typer.Option(min=0, max=65535, help="State and metrics [8001]")] = None,
    backend: Annotated[Backend | None, typer.Option(help="Which engine [embedded]")] = None,
    distserve_home: Annotated[Path | None, typer.Option(help="Checkout of DistServe; default: DISTSERVE_HOME")] = None,
    proxies: Annotated[int, typer.Option(min=1, max=8, help="Each 10 ports above the one before it; with gossip")] = 1,
) -> None:
    """Keep a cluster running behind its proxies until Ctrl-C."""
    from kvrs.cluster.launcher import Cluster
    from kvrs.cluster.upkeep import Upkeep

    read_config = partial(_up_config, config, proxies, model, nodes, port, admin_port, backend, distserve_home)
    settings = read_config()
    upkeep = Upkeep(_say, read_config)
    # From here on the launcher ends in one way only, so that it can always clean up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: upkeep.stop.set())
    # Not SIGHUP, as daemons do: a terminal that is closed must not leave a cluster behind.
    signal.signal(signal.SIGUSR1, lambda *_: upkeep.restart())
    with Cluster(settings, _say, proxies) as cluster:
        for proxy, (url, admin_url) in enumerate(zip(cluster.urls, cluster.admin_urls, strict=True)):
            what = "or at" if proxy else "kvrs is up:"
            _say(f"{what} {url}/v1 (OpenAI API), {admin_url}/kvrs/v1/state")
        _say(f"Ctrl-C ends it; kill -USR1 {os.getpid()} restarts all of it, one process at a time")
        upkeep.run(cluster)
        _say("ending")


def _up_config(
    config: Path | None,
    proxies: int,
    model: Path | None,
    nodes: int | None,
    port: int | None,
    admin_port: int | None,
    backend: Backend | None,
    distserve_home: Path | None,
) -> Config:
    """The file's settings, or the demo's, with what was said on the command line."""
    if config is not None and nodes is not None:
        raise ConfigError([f"--nodes: got {nodes} beside --config; allowed: one of them (the file names its nodes)"])
    given = Config() if config is None else load_config(config)
    document = given.model_dump(mode="json")
    # Several proxies need somebody who shares the slots of a target out among them: the agents, which come with gossip.
    if proxies > 1 and "enabled" not in given.gossip.model_fields_set:
        document["gossip"]["enabled"] = True
    if nodes is not None:
        document["cluster"]["nodes"] = [node.model_dump(mode="json") for node in demo_nodes(nodes)]
    if model is not None:
        if not (model / "config.json").is_file():
            raise ConfigError([f"--model: {model} has no config.json; allowed: a Hugging Face model directory"])
        document["cluster"]["model"] = str(model.resolve())
    if backend is not None:
        document["cluster"]["backend"] = backend.value
    if distserve_home is not None:
        if document["cluster"]["backend"] != Backend.DISTSERVE:
            raise ConfigError(["--distserve-home: given without --backend distserve; allowed: both, or neither"])
        document["cluster"]["distserve"]["home"] = str(distserve_home.resolve())
    for key, value in (("port", port), ("admin_port", admin_port)):
        if value is not None:
            document["proxy"][key] = value
    return parse_config(document)


@app.command()
def proxy(config: ConfigFile) -> None:
    """Run the proxy alone, in front of instances that are already up."""
    import uvloop

    from kvrs.logs import log_to_stderr
    from kvrs.proxy.server import serve

    settings = load_config(config)
    # vLLM's instances name the port of their pages in every hand-off.
    needed = ("port",) if settings.cluster.backend is Backend.VLLM else ("port", "page_port")
    faults = [
        f"instance {instance.id}: {key} is 0; allowed: the port it listens on, since it is already up"
        for _, instance in settings.cluster.instances()
        for key in needed
        if not getattr(instance, key)
    ]
    if settings.agents_run:
        faults += [
            f"agent of node {node.id}: {key} is 0; allowed: the port it listens on, or backup.mode: off and no gossip"
            for node in settings.cluster.nodes
            for key in ("port", "page_port")
            if not getattr(node.agent, key)
        ]
    if faults:
        raise ConfigError(faults)
    log_to_stderr()
    secret, *older = read_secrets(settings.security, os.environ)
    uvloop.run(serve(settings, secret, older))


@app.command()
def agent(
    config: ConfigFile,
    node: Annotated[str, typer.Option(help="Id of the node in cluster.nodes whose agent this is")],
) -> None:
    """Run the agent of one node alone: it keeps checkpoints of KV in host memory."""
    from kvrs.agent.__main__ import run_agent

    settings = load_config(config)
    known = {each.id: each.agent for each in settings.cluster.nodes}
    if (given := known.get(NodeId(node))) is not None and not (given.port and given.page_port):
        raise ConfigError([f"agent of node {node}: its port or page_port is 0; allowed: the ports that others find it at"])
    run_agent(settings, NodeId(node))


@app.command()
def replay(
    url: Annotated[str, typer.Option(help="Base of an OpenAI endpoint, such as http://127.0.0.1:8000")],
    trace: Annotated[Path | None, typer.Option(help="Mooncake JSONL, Azure CSV or BurstGPT CSV, told apart by content")] = None,
    preset: Annotated[str | None, typer.Option(help="Or a generated trace with published statistics")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of a preset")] = 100,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Count a trace's bad lines, go on without them")
    ] = False,
    window: Annotated[str | None, typer.Option(metavar="A:B", help="Requests number A up to but without B")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="So many of them, at random")] = None,
    time_scale: Annotated[float, typer.Option(help="0.1: ten times as fast")] = 1.0,
    rate: Annotated[float | None, typer.Option(help="Requests per second, in place of a time scale")] = None,
    jitter: Annotated[float, typer.Option(help="Seconds; Mooncake's times come in batches of 3 s")] = 0.0,
    length_scale: Annotated[float, typer.Option(help="Blocks shrink alike, so that shared prefixes stay shared")] = 1.0,
    max_input: Annotated[int | None, typer.Option(min=1, help="Longer prompts are cut")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Longer outputs are cut")] = None,
    write_trace: Annotated[Path | None, typer.Option(help="Keep the shaped trace")] = None,
    api: Annotated[Api, typer.Option(help="Which endpoint")] = Api.COMPLETIONS,
    model: Annotated[str | None, typer.Option(help="Default: the server's only one")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without return_token_ids and ignore_eos")] = False,
    text_prompts: Annotated[bool, typer.Option("--text-prompts", help="Words instead of token ids")] = False,
    vocab_size: Annotated[int, typer.Option(min=16, help="Prompt ids are below it")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: greedy")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, sample, jitter and random victims")] = 0,
    timeout_s: Annotated[float, typer.Option(help="Per stream")] = 300.0,
    repeat: Annotated[int, typer.Option(min=1, help="Runs; means get 95 % intervals")] = 1,
    oracle: Annotated[bool, typer.Option("--oracle", help="Again without faults, compared token by token")] = False,
    fault: Annotated[Path | None, typer.Option(help="YAML list of faults; needs --admin-url")] = None,
    admin_url: Annotated[str | None, typer.Option(help="The proxy's admin port")] = None,
    secret_file: Annotated[str | None, typer.Option(help="The cluster's secret; default: the environment's KVRS_SECRET")] = None,
    slo_ttft: Annotated[float, typer.Option(help="Seconds; counts for goodput")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="Seconds; counts for goodput")] = 0.2,
    slo_tbt: Annotated[float | None, typer.Option(help="Seconds; longest time between two tokens")] = None,
    out: Annotated[Path, typer.Option(help="Where report.json and report.html go")] = Path("out/replay"),
) -> None:
    """Drive an OpenAI endpoint with a trace, hit it on purpose if asked to, and report what clients saw."""
    given = locals()
    from kvrs.cluster.faults import check_faults, strike
    from kvrs.replay.command import ReplayOptions, parse_window, run_replay
    from kvrs.replay.load import Dialect
    from kvrs.replay.metrics import Slo

    secret = None
    if secret_file is not None or ENV_NAME in os.environ:
        secret = read_secret(SecuritySettings(secret_file=secret_file), os.environ)
    options = _filled(
        ReplayOptions,
        given,
        window=None if window is None else parse_window(window),
        jitter_s=jitter,
        dialect=_filled(Dialect, given, api_key=os.environ.get("OPENAI_API_KEY")),
        secret=secret,
        slo=Slo(ttft_s=slo_ttft, tpot_s=slo_tpot, tbt_s=slo_tbt),
    )
    raise typer.Exit(0 if run_replay(options, strike, check_faults) else 1)


@app.command()
def simulate(
    config: Annotated[Path | None, typer.Option(help="YAML file; without it, the cluster of the demo")] = None,
    trace: Annotated[Path | None, typer.Option(help="Mooncake JSONL, Azure CSV or BurstGPT CSV; without it, generated")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many streams")] = 100,
    rate: Annotated[float, typer.Option(help="Requests per second")] = 8.0,
    fault: Annotated[Path | None, typer.Option(help="YAML list of faults")] = None,
    deaths: Annotated[int, typer.Option(min=0, help="So many random deaths of all kinds")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the first simulation")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many simulations, each with the next seed")] = 1,
    proxies: Annotated[int, typer.Option(min=1, help="Each with a policy object and a view of its own")] = 1,
) -> None:
    """Run the same policy, scheduling and checkpoint book in virtual time, with faults, and check the laws as it runs."""
    given = locals()
    from kvrs.sim.command import SimulateOptions, run_simulation

    raise typer.Exit(run_simulation(_filled(SimulateOptions, given)))


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Two or more report.json; the first is what others are compared with")],
) -> None:
    """Compare reports: every measure, its ratio to the first, and the interval of that ratio."""
    from kvrs.replay.compare import compare_reports

    Console().print(compare_reports(files))


@app.command()
def explain(
    profile: Annotated[str | None, typer.Option(help="Name of a table that comes with kvrs, or the path of one")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="L: what the client wrote")] = None,
    output_tokens: Annotated[int, typer.Option(min=0, help="t: what it already has")] = 0,
    bandwidth: Annotated[str, typer.Option(help="Between the nodes: 25Gbit/s, 3.1GB/s, or the name of a link")] = "10Gbit/s",
    local_bandwidth: Annotated[str | None, typer.Option(help="Within a node; default: the profile's GPU, where known")] = None,
    queue_depth: Annotated[float | None, typer.Option(help="Requests ahead at the prefill instance beside the target")] = None,
    queue_s: Annotated[float | None, typer.Option(help="Or how long they take")] = None,
    service_s: Annotated[float | None, typer.Option(help="Per request ahead; default: this prompt's own prefill")] = None,
    target_queue_s: Annotated[float, typer.Option(help="Work ahead at the target decode instance")] = 0.0,
    held_tokens: Annotated[int | None, typer.Option(help="Of which prefill still holds the KV; default: the prompt's")] = None,
    checkpoint_tokens: Annotated[int, typer.Option(min=0, help="Of prompt and output, held by an agent")] = 0,
    checkpoint_at: Annotated[CheckpointAt, typer.Option(help="Whose node that agent is on")] = CheckpointAt.TARGET,
    host_bandwidth: Annotated[str | None, typer.Option(help="From an agent's memory into an instance beside it")] = None,
    reused_tokens: Annotated[int, typer.Option(min=0, help="Of prompt and output, at the target already")] = 0,
    own_queue_depth: Annotated[float, typer.Option(help="Requests ahead at the own decode instance, for the hand-off")] = 0.0,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache", help="Engines that fetch no pages, as vLLM")] = False,
    correct: Annotated[list[str] | None, typer.Option(metavar="OPTION=FACTOR", help="What was learnt; may be repeated")] = None,
    budget_s: Annotated[float | None, typer.Option(help="The longest pause allowed; beyond it the answer is abort")] = None,
    policy: Annotated[PolicyName, typer.Option(help="By which rule")] = PolicyName.AUTO,
    log: Annotated[Path | None, typer.Option(help="Or a proxy's event log: show its incidents, decide them again")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs")] = False,
) -> None:
    """One recovery decision: all options, the terms of each sum, and where the answer would flip. Or a whole event log."""
    given = locals()
    from kvrs.explain import ExplainOptions, explain_log, run_explain

    if log is not None:
        raise typer.Exit(0 if explain_log(log, as_json=as_json) else 1)
    missing = [f"--{name.replace('_', '-')}: missing" for name in ("profile", "prompt_tokens") if given[name] is None]
    if missing:
        raise ConfigError([f"{line}; allowed: a value, or --log with an event log instead" for line in missing])
    run_explain(_filled(ExplainOptions, given, corrections=correct or (), json=as_json))


@app.command()
def profile(
    out: Annotated[Path, typer.Option(help="The table, as JSON; `profiles.prefill` takes its path")],
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory; without it, a tiny random model")] = None,
    label: Annotated[str | None, typer.Option(help="What the table is called; default: model and machine")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    longest_tokens: Annotated[int | None, typer.Option(min=1, help="Default: what the model takes, at most 1,024")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Largest decode batch")] = 16,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step of a chunked prefill")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Per point; the median counts")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the generated model")] = 0,
) -> None:
    """Measure prefill, decode, page save and load, and links of the embedded engine on this machine."""
    given = locals()
    from kvrs.engine.profiler import ProfileOptions, run_profile

    _say(f"profile: {run_profile(_filled(ProfileOptions, given))}")


@config_app.command()
def check(file: Annotated[Path, typer.Argument(help="YAML file")]) -> None:
    """Name every fault of a configuration file at once; nothing is started."""
    load_config(file)
    console.print(f"{file} is valid", style="green")


def _filled(kind: type[Options], given: dict[str, Any], **rest: Any) -> Options:
    """An options object from the parameters of a command that are called like its fields, and from what needs more than that."""
    same = {field.name: given[field.name] for field in fields(kind) if field.name in given}
    return kind(**(same | rest))


def _say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)
