"""`kvrs lab explain`: one decision, taken apart."""

from collections.abc import Set
from typing import Annotated

import typer

import kvrs.cli.options as base
import kvrs_lab.cli.options as opt
from kvrs.config.policy import PolicyName
from kvrs.core.explanation import CheckpointAt
from kvrs.errors import ConfigError
from kvrs.protocol.connector import STAGING_BYTES
from kvrs.tables import show
from kvrs_lab.explain.elastic import KvBackup

# Parameters of `kvrs lab explain` that only `--elastic` has, and those that it has as well.
_OF_ELASTIC = frozenset(
    ("elastic", "tp", "lost", "requests", "context", "backup", "zipf", "room_share")
)
_OF_BOTH = frozenset(("bandwidth", "local_bandwidth", "host_bandwidth"))
_OF_DRAFTS = frozenset(("draft", "acceptance", "depth", "batch", "disk"))


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
    elastic: opt.Elastic = None,
    tp: opt.ElasticTp = 8,
    lost: opt.ElasticLost = 1,
    requests: opt.ElasticRequests = 56,
    context: opt.ElasticContext = "16k",
    backup: opt.ElasticBackup = KvBackup.OFF,
    zipf: opt.ElasticZipf = None,
    room_share: opt.ElasticRoomShare = None,
    draft: opt.DraftProfile = None,
    acceptance: opt.Acceptance = 0.6,
    depth: opt.Depth = 4,
    batch: opt.AssistedBatch = 8,
    disk: opt.Disk = "2GB/s",
    as_json: base.Json = False,
) -> None:
    """Show one recovery decision: all options, the terms of each sum, where the answer flips."""
    given = locals()
    from kvrs.cli.incidents import explain_log
    from kvrs_lab.explain.questions import decision_document, drafts_document, elastic_document

    if elastic is not None:
        _refuse_unused(ctx, "--elastic", _OF_ELASTIC | _OF_BOTH)
        show(elastic_document(given), as_json=as_json)
        return
    if log is not None:
        _refuse_unused(ctx, "--log", {"log"})
        raise typer.Exit(0 if explain_log(log, as_json=as_json) else 1)
    if draft is not None and profile is not None:
        _refuse_unused(ctx, "--draft", _OF_DRAFTS | {"profile", "context"})
        show(drafts_document(given), as_json=as_json)
        return
    missing = [
        f"--{name.replace('_', '-')}: missing"
        for name in ("profile", "prompt_tokens")
        if given[name] is None
    ]
    if missing:
        instead = "--log with an event log or --elastic with a profile instead"
        raise ConfigError([f"{line}; allowed: a value, or {instead}" for line in missing])
    _refuse_unused(
        ctx, "--profile", ctx.params.keys() - _OF_ELASTIC - _OF_DRAFTS - {"log", "as_json"}
    )
    show(decision_document(given), as_json=as_json)


def _refuse_unused(ctx: typer.Context, mode: str, used: Set[str]) -> None:
    """Raises ConfigError: an option was given that this kind of question does not have."""
    unused = [
        f"--{name.replace('_', '-')}: given with {mode}, which does not use it"
        for name in ctx.params
        if name not in used | {"as_json"}
        and (source := ctx.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if unused:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(used))
        raise ConfigError([f"{line}; allowed: {flags}" for line in unused])
