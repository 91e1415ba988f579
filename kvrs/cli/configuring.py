"""Commands that neither start a process nor ask one.

`kvrs config`: configuration files checked, shown and written; nothing is started.

Commands that neither start a process nor ask one: the incidents of an event log, an API key.
"""

import json
import os
import secrets
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import kvrs.cli.options as opt
from kvrs.cli.common import console, faults_in
from kvrs.config.cluster import Backend
from kvrs.config.document import KeyPath, comment, commented_yaml, flow, shown_path
from kvrs.config.file import Config, checked, leaves, load_config, load_source, unread
from kvrs.config.security import check_name, key_hash
from kvrs.errors import ConfigError

File = Annotated[Path, typer.Argument(help="YAML file")]
Files = Annotated[list[Path], typer.Argument(help="YAML files")]
ShownFile = Annotated[Path | None, typer.Argument(help="YAML file; without it, the defaults")]
NewFile = Annotated[Path, typer.Argument(help="File to write; an existing one is kept")]
Elsewhere = Annotated[
    bool,
    typer.Option("--elsewhere", help="Check files for other machines: look up no file here"),
]
DEFAULT = "default"  # Origin of a value that neither file nor environment has.
Situation = Annotated[
    Backend,
    typer.Option(
        "--for",
        help="vllm, sglang: a proxy in front of running servers; others: a cluster to try out",
    ),
]


def check(files: Files, elsewhere: Elsewhere = False) -> None:
    """Print every fault of configuration files at once."""
    from kvrs.cli.feasibility import remarks_on

    found: dict[Path, Config] = {}
    if faults := [
        fault for each in files for fault in faults_in(partial(_check_one, each, elsewhere, found))
    ]:
        raise ConfigError(faults)
    for line in sorted(unread(os.environ, Config)):
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for file, config in found.items():
        for line in dict.fromkeys(remarks_on(config, elsewhere=elsewhere)):
            console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
        console.print(f"{file} is valid", style="green", markup=False, soft_wrap=True)


def _check_one(file: Path, elsewhere: bool, found: dict[Path, Config]) -> None:
    """Check a file, and add its configuration to `found`. Raises ConfigError."""
    from kvrs.cli.feasibility import check_all, faults_of

    config = checked(source := load_source(file, os.environ))
    check_all(source, faults_of(config, os.environ, elsewhere=elsewhere))
    found[file] = config


def show(
    file: ShownFile = None,
    preset: opt.Preset = None,
    as_json: opt.Json = False,
) -> None:
    """Print the configuration in effect as YAML, and where each value comes from."""
    from kvrs.config.schema import is_read_by

    source = load_source(file, os.environ, preset)
    config = load_config(file, os.environ, preset).model_dump(mode="json")
    origins = {path: source.place_of(path) or DEFAULT for path, _ in leaves(config)}
    if as_json:
        found = {"config": config, "from": {shown_path(path): origins[path] for path in origins}}
        print(json.dumps(found, indent=2))
    else:
        if preset is not None:
            print(*comment(preset.line), sep="\n")
        backend = config["cluster"]["backend"]
        left_out = {
            path
            for path, origin in origins.items()
            if origin == DEFAULT and not is_read_by(path, backend)
        }
        print(commented_yaml(_without(config, left_out), origins.get).rstrip())
        note = f"{len(left_out)} defaults that {backend} does not read are left out; see --json."
        print("", *comment(note), sep="\n")


def _without(node: Any, left_out: Set[KeyPath], above: KeyPath = ()) -> Any:
    """Return a document without these values, and without the sections that they leave empty."""
    if isinstance(node, list):
        return [_without(each, left_out, (*above, at)) for at, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _without(value, left_out, (*above, key))
        for key, value in node.items()
        if (*above, key) not in left_out
    }
    return {key: value for key, value in kept.items() if value != {}}


def init(file: NewFile, backend: Situation = Backend.EMBEDDED) -> None:
    """Write a first configuration file with comments."""
    from kvrs.config.schema import first_file

    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(first_file(backend))
    except FileExistsError:
        raise ConfigError(f"{file}: exists; allowed: a file that does not") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    console.print(f"{file} is written; its first lines say what to do", style="green")


def schema() -> None:
    """Print the JSON schema of configuration files, for editors and other checkers."""
    from kvrs.config.schema import json_schema, with_commands

    print(with_commands(json.dumps(json_schema(), indent=2)))


def incidents(
    log: Annotated[Path, typer.Argument(help="A proxy's event log (proxy.event_log)")],
    instance: Annotated[
        str | None, typer.Argument(help="Only incidents of this instance or agent")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only incidents from this time in UTC on: '2026-11-30 03:57'")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Describe the incidents of an event log, list their decisions, and decide them again."""
    from kvrs.cli.incidents import show_incidents

    raise typer.Exit(0 if show_incidents(log, instance, since, as_json=as_json) else 1)


def key(tenant: Annotated[str, typer.Argument(help="Name of the tenant")]) -> None:
    """Make an API key, printed only once, and the line of security.key_file that accepts it."""
    check_name(tenant)
    made = f"kvrs-{secrets.token_urlsafe(32)}"
    console.print("for the client, it is stored nowhere:", style="dim", highlight=False)
    print(made, flush=True)
    console.print("for security.key_file:", style="dim", highlight=False)
    print(f"{flow(tenant)}: {{keys: [{key_hash(made.encode()).hex()}]}}")
