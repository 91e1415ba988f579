"""`kvrs config`: configuration files checked, shown, compared and written; nothing is started."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column, Table
from rich.text import Text

import kvrs.cli.options as opt
from kvrs.cli.common import console
from kvrs.config.cluster import Backend
from kvrs.config.commented import flow
from kvrs.config.file import checked, load_config, load_source
from kvrs.errors import ConfigError
from kvrs.tables import folded, output

DIFFERENT = 1  # The exit status of `diff`, as that of diff(1).

File = Annotated[Path, typer.Argument(help="YAML file")]
ShownFile = Annotated[Path | None, typer.Argument(help="YAML file; without it, the defaults")]
Other = Annotated[Path, typer.Argument(help="YAML file to compare with")]
NewFile = Annotated[Path, typer.Argument(help="File to be written; one that exists is kept")]
Elsewhere = Annotated[
    bool,
    typer.Option("--elsewhere", help="For other machines: look up no files and no names here"),
]
Situation = Annotated[
    Backend, typer.Option("--for", help="vllm: a proxy in front of it; others: a try-out")
]


def check(file: File, elsewhere: Elsewhere = False) -> None:
    """Print every fault of a configuration file at once."""
    from kvrs.cli.feasibility import faults_of, remarks_on

    config = checked(source := load_source(file, os.environ))
    if found := faults_of(config, os.environ, elsewhere=elsewhere):
        raise ConfigError([source.located(fault) for fault in found])
    for line in remarks_on(config, elsewhere=elsewhere):
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{file} is valid", style="green", markup=False, soft_wrap=True)


def show(file: ShownFile = None, preset: opt.Preset = None, as_json: opt.Json = False) -> None:
    """Print the configuration in effect as YAML, and where each value comes from."""
    from kvrs.config.effective import show, show_json

    source = load_source(file, os.environ, preset)
    print(json.dumps(show_json(source), indent=2) if as_json else show(source).rstrip())


def diff(first: File, second: Other, as_json: opt.Json = False) -> None:
    """Print what two files configure differently, whatever they look like."""
    from kvrs.config.effective import differences

    found = list(differences(*(load_config(path, os.environ) for path in (first, second))))
    if as_json:
        print(json.dumps(found, indent=2))
    elif found:
        output().print(_difference_table(first, second, found), highlight=False)
    else:
        console.print("no difference in effect", style="green")
    raise typer.Exit(DIFFERENT if found else 0)


def init(file: NewFile, backend: Situation = Backend.EMBEDDED) -> None:
    """Write a first configuration file with comments."""
    from kvrs.config.first_file import first_file

    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(first_file(backend))
    except FileExistsError:
        raise ConfigError([f"{file}: exists; allowed: a file that does not"]) from None
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from None
    console.print(f"{file} is written; its first lines say what to do", style="green")


def schema() -> None:
    """Print the JSON schema of configuration files, for editors and other checkers."""
    from kvrs.config.reference import json_schema

    print(json.dumps(json_schema(), indent=2))


def _difference_table(first: Path, second: Path, found: list[dict[str, Any]]) -> Table:
    table = Table("key", Column(Text(str(first))), Column(Text(str(second))), box=box.SIMPLE_HEAD)
    for each in found:
        values = (flow(each[side]) if side in each else "-" for side in ("first", "second"))
        table.add_row(Text(each["key"]), *map(Text, values))
    return folded(table)
