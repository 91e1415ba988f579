"""`kvrs lab explain`: one decision, taken apart."""

from typing import Annotated

import typer

import kvrs.cli.options as base
import kvrs_lab.cli.options as opt
from kvrs.config.policy import PolicyName
from kvrs.core.explanation import CheckpointAt
from kvrs.errors import ConfigError
from kvrs.protocol.connector import STAGING_BYTES
from kvrs.tables import show


def explain(
    ctx: typer.Context,
    profile: opt.Profile = None,
    prompt_tokens: opt.PromptTokens = None,
    output_tokens: opt.OutputTokens = 0,
    bandwidth: opt.Bandwidth = "10Gbit/s",
    local_bandwidth: opt.LocalBandwidth = None,
    queue_depth: opt.QueueDepth = None,
    queue_s: Annotated[float | None, typer.Option(help="Or how long they take")] = None,
    service_s: opt.ServiceS = None,
    target_queue_s: opt.TargetQueueS = 0.0,
    held_tokens: opt.HeldTokens = None,
    checkpoint_tokens: opt.CheckpointTokens = 0,
    checkpoint_at: opt.CheckpointPlace = CheckpointAt.TARGET,
    host_bandwidth: opt.HostBandwidth = None,
    reused_tokens: opt.ReusedTokens = 0,
    own_queue_depth: opt.OwnQueueDepth = 0.0,
    prefix_cache: opt.PrefixCache = False,
    staging_bytes: opt.StagingBytes = STAGING_BYTES,
    correct: opt.Correct = None,
    budget_s: opt.BudgetS = None,
    others: opt.Others = 0.0,
    policy: Annotated[
        PolicyName,
        typer.Option(metavar=base.POLICY, help=f"Policy that decides: {base.POLICIES}"),
    ] = PolicyName.AUTO,
    log: opt.Log = None,
    as_json: base.Json = False,
) -> None:
    """Show one recovery decision: all options, the terms of each sum, where the answer flips."""
    given = locals()
    from kvrs.cli.incidents import explain_log
    from kvrs_lab.explain.questions import decision_document

    if log is not None:
        _refuse_unused(ctx)
        raise typer.Exit(0 if explain_log(log, as_json=as_json) else 1)
    missing = [
        f"--{name.replace('_', '-')}: missing"
        for name in ("profile", "prompt_tokens")
        if given[name] is None
    ]
    if missing:
        instead = "--log with an event log instead"
        raise ConfigError([f"{line}; allowed: a value, or {instead}" for line in missing])
    show(decision_document(given), as_json=as_json)


def _refuse_unused(ctx: typer.Context) -> None:
    """Raises ConfigError: an option was given that the reading of a log does not have."""
    unused = [
        f"--{name.replace('_', '-')}: given with --log, which does not use it; allowed: --json"
        for name in ctx.params
        if name not in ("log", "as_json")
        and (source := ctx.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if unused:
        raise ConfigError(unused)
