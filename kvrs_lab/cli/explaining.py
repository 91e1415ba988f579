"""`kvrs lab explain`: an analysis of one decision."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

import kvrs.cli.options as base
import kvrs_lab.cli.options as opt
from kvrs.errors import ConfigError
from kvrs.tables import output, show

_SAID = ("source", "incident", "why_not")  # Keys whose values stand above the tables.


def explain(
    ctx: typer.Context,
    profile: opt.Profile = None,
    prompt_tokens: opt.PromptTokens = None,
    output_tokens: opt.OutputTokens = 0,
    bandwidth: opt.Bandwidth = "10Gbit/s",
    queue_depth: opt.QueueDepth = 0.0,
    checkpoint_tokens: opt.CheckpointTokens = 0,
    prefix_cache: opt.PrefixCache = None,
    replay: opt.ReplayedLog = None,
    changed: opt.Changed = None,
    as_json: base.Json = False,
) -> None:
    """Show one recovery decision and its terms, break-even, or a log's decisions decided anew."""
    given = locals()
    from kvrs_lab.explain.questions import break_even_document, decision_document

    if replay is not None:
        _refuse_unused(ctx, "with --replay", ("as_json", "replay", "changed"))
        document = _replayed(replay, changed or [])
    elif changed:
        raise ConfigError("--set: given without --replay; allowed: --replay EVENTLOG")
    elif prompt_tokens is None:
        raise ConfigError("--prompt-tokens: missing; allowed: a whole number")
    elif profile is None:
        _refuse_unused(ctx, "without --profile", ("as_json", "prompt_tokens"))
        document = break_even_document(prompt_tokens)
    else:
        document = decision_document(given)
    if not as_json:
        said = [document.pop("sentence")]
        if "profile" in document:  # In a table, its length would be the width of every row.
            said.append(f"source of the profile: {document['profile']['source']}")
        output().print("\n".join(said), markup=False, highlight=False)
        del document["version"]
    show(document, as_json=as_json, hidden=_SAID)


def _replayed(log: Path, changed: list[str]) -> dict[str, Any]:
    """Make the decisions of a log's incidents under these settings.

    Raises:
        ConfigError: no settings, or wrong ones.
        LogError: the file cannot be read, has an invalid line, or begins in the middle.
    """
    from kvrs.cli.incidents import lines_of, named
    from kvrs_lab.explain.replayed import changes_of, compared, document_of

    changes = changes_of(changed)
    lines, notes = lines_of(log)
    with named(log):
        document = document_of(compared(lines, changes), changes)
    return document | {"notes": notes} if notes else document


def _refuse_unused(ctx: typer.Context, given: str, used: Collection[str]) -> None:
    """Raises ConfigError: an option was given that belongs to another kind of question."""
    options = {each.name: each.opts[0] for each in ctx.command.params}
    allowed = ", ".join(options[each] for each in used)
    unused = [
        f"{options[name]}: given {given}, which does not use it; allowed: {allowed}"
        for name in ctx.params
        if name not in used
        and (source := ctx.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if unused:
        raise ConfigError(unused)
