"""`kvrs lab explain`: one decision, taken apart."""

import typer

import kvrs.cli.options as base
import kvrs_lab.cli.options as opt
from kvrs.errors import ConfigError
from kvrs.protocol.connector import STAGING_BYTES
from kvrs.tables import show


def explain(
    ctx: typer.Context,
    profile: opt.Profile = None,
    prompt_tokens: opt.PromptTokens = None,
    output_tokens: opt.OutputTokens = 0,
    bandwidth: opt.Bandwidth = "10Gbit/s",
    queue_depth: opt.QueueDepth = 0.0,
    checkpoint_tokens: opt.CheckpointTokens = 0,
    prefix_cache: opt.PrefixCache = False,
    staging_bytes: opt.StagingBytes = STAGING_BYTES,
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
