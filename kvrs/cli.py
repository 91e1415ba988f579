"""The command line. Each command checks its input, then hands over to the package that does the work."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvrs.config import Config, demo_nodes, load_config, parse_config, read_secret
from kvrs.errors import ConfigError, KvrsError
from kvrs.policy.config import PolicyName

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__import__("kvrs").__doc__)
config_app = typer.Typer(no_args_is_help=True, help="Work with configuration files.")
app.add_typer(config_app, name="config")

console = Console(stderr=True, highlight=False)

ConfigFile = Annotated[Path, typer.Option("--config", help="YAML file; see docs/policies.md for every key")]


def main() -> None:
    """Run the command line; what the user did wrong is said in plain lines and ends with status 2."""
    try:
        app()
    except KvrsError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        sys.exit(2)


@app.command()
def demo(
    policy: Annotated[PolicyName, typer.Option(help="How victims are recovered")] = PolicyName.AUTO,
    requests: Annotated[int, typer.Option(min=9, max=2000, help="How many streams to replay")] = 60,
    trace: Annotated[Path | None, typer.Option(help="Mooncake JSONL; its lengths are scaled to the tiny model")] = None,
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
) -> None:
    """Keep a cluster running behind the proxy until Ctrl-C."""
    from kvrs.cluster.launcher import Cluster

    settings = _up_config(config, model, nodes, port, admin_port)
    stop = threading.Event()
    # From here on the launcher ends in one way only, so that it can always clean up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    with Cluster(settings, _say) as cluster:
        _say(f"kvrs is up: {cluster.url}/v1 (OpenAI API), {cluster.admin_url}/kvrs/v1/state; Ctrl-C ends it")
        while not stop.wait(0.5):
            cluster.check()
        _say("ending")


def _up_config(config: Path | None, model: Path | None, nodes: int | None, port: int | None, admin_port: int | None) -> Config:
    """The file's settings, or the demo's, with what was said on the command line."""
    if config is not None and nodes is not None:
        raise ConfigError([f"--nodes: got {nodes} beside --config; allowed: one of them (the file names its nodes)"])
    document = (Config() if config is None else load_config(config)).model_dump(mode="json")
    if nodes is not None:
        document["cluster"]["nodes"] = [node.model_dump(mode="json") for node in demo_nodes(nodes)]
    if model is not None:
        if not (model / "config.json").is_file():
            raise ConfigError([f"--model: {model} has no config.json; allowed: a Hugging Face model directory"])
        document["cluster"]["model"] = str(model.resolve())
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
    faults = [
        f"instance {instance.id}: {key} is 0; allowed: the port it listens on, since it is already up"
        for _, instance in settings.cluster.instances()
        for key in ("port", "page_port")
        if not getattr(instance, key)
    ]
    if faults:
        raise ConfigError(faults)
    log_to_stderr()
    uvloop.run(serve(settings, read_secret(settings.security, os.environ)))


@config_app.command()
def check(file: Annotated[Path, typer.Argument(help="YAML file")]) -> None:
    """Name every fault of a configuration file at once; nothing is started."""
    load_config(file)
    console.print(f"{file} is valid", style="green")


def _say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)
