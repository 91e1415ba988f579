"""`kvrs doctor` checks this machine and the cluster; it starts and changes nothing."""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

import kvrs.cli.options as opt
from kvrs.cli.findings import Finding, Level, has_failed
from kvrs.config.file import load_config
from kvrs.config.origin import CommandLine

if TYPE_CHECKING:
    from kvrs.cli.cluster_checks import ProxyAnswer

FAILED = 1  # Exit status if a check has found a fault.

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}

CheckedFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="YAML file; without it, the command line of the proxy, or the defaults"
    ),
]
AdminUrl = Annotated[
    str | None, typer.Option(help="The proxy's admin port; default: that of the settings")
]


def doctor(
    config: CheckedFile = None,
    admin_url: AdminUrl = None,
    as_json: opt.Json = False,
) -> None:
    """Check this machine, and the cluster if its proxy answers; print each problem and its fix."""
    from kvrs.cli.cluster_checks import ask, cluster_findings
    from kvrs.cli.machine_checks import machine_findings
    from kvrs.cli.model_checks import exactness_findings, model_findings

    # Log lines of the modules that are checked would only repeat the findings.
    for package in ("kvrs", "kvrs_engine"):
        logging.getLogger(package).addHandler(logging.NullHandler())
    settings = load_config(config, os.environ)
    answer = ask(settings, os.environ, url=admin_url)
    if config is None and (line := _command_line(answer)) is not None:
        settings = line.read(os.environ)
    first = list(exactness_findings(answer))
    is_default = config is None and answer.state is None
    machine = list(machine_findings(settings, os.environ, answer, is_default=is_default))
    cluster = list(cluster_findings(settings, answer))
    if answer.state is not None:
        cluster += model_findings(settings, answer.state)
    everything = [*first, *machine, *cluster]
    if as_json:
        parts = {"exactness": first, "machine": machine, "cluster": cluster}
        shown = {part: [asdict(each) for each in found] for part, found in parts.items()}
        print(json.dumps(shown, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for title, found in (("", first), ("This machine", machine), ("The cluster", cluster)):
            if title:
                console.print(title, style="bold")
            for each in found:
                console.print(_line(each))
        console.print(_verdict(everything, is_checked=answer.state is not None))
    raise typer.Exit(FAILED if has_failed(everything) else 0)


def _command_line(answer: "ProxyAnswer") -> CommandLine | None:
    """Return the command line of the proxy that has answered; None: the proxy has a file, or none
    has answered.
    """
    row = None if answer.state is None else answer.state["proxies"][0].get("command_line")
    return None if row is None else msgspec.convert(row, CommandLine)


def _line(finding: Finding) -> Text:
    line = Text.assemble(
        (f"  {finding.level.value:<8}", _COLOURS[finding.level]),
        f"{finding.check}: {finding.value}",
    )
    if finding.allowed:
        line.append(f"; allowed: {finding.allowed}")
    if finding.remedy:
        line.append(f"; to do: {finding.remedy}")
    return line


def _verdict(findings: Iterable[Finding], *, is_checked: bool) -> str:
    """Return the last line. `is_checked`: a proxy answered, so that the cluster was checked."""
    levels = [each.level for each in findings]
    failures, warnings = levels.count(Level.FAILURE), levels.count(Level.WARNING)
    counts = (
        f"{len(levels)} checks: {failures} failure{'' if failures == 1 else 's'}, "
        f"{warnings} warning{'' if warnings == 1 else 's'}"
    )
    if is_checked:
        return counts
    return f"{counts}; the cluster was not checked: --admin-url URL of a running proxy checks it"
