"""Commands that start nothing: the incidents of an event log, an API key."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

import kvrs.cli.options as opt
from kvrs.cli.common import console
from kvrs.config.commented import flow
from kvrs.config.policy import PolicyName
from kvrs.config.tenants import check_name, key_hash


def incidents(
    log: Annotated[Path, typer.Argument(help="A proxy's event log (proxy.event_log)")],
    number: Annotated[int | None, typer.Argument(metavar="ID", help="One, in detail")] = None,
    what_if: Annotated[
        PolicyName | None,
        typer.Option(
            metavar=opt.POLICY,
            help=f"What this policy would have decided at each moment: {opt.POLICIES}",
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List the incidents of an event log: cause, victims, decisions, outcome, regret."""
    from kvrs.cli.incidents import show_incidents

    show_incidents(log, number, what_if, as_json=as_json)


def key(tenant: Annotated[str, typer.Argument(help="Name of the tenant")]) -> None:
    """Make an API key, printed only once, and the line of security.key_file that accepts it."""
    check_name(tenant)
    made = f"kvrs-{secrets.token_urlsafe(32)}"
    console.print("for the client, it is stored nowhere:", style="dim", highlight=False)
    print(made, flush=True)
    console.print("for security.key_file:", style="dim", highlight=False)
    print(f"{flow(tenant)}: {{keys: [{key_hash(made.encode()).hex()}]}}")
