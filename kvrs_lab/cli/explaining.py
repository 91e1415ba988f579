"""`kvrs lab explain`: an analysis of one decision."""

from collections.abc import Collection

import typer

import kvrs.cli.options as base
import kvrs_lab.cli.options as opt
from kvrs.errors import ConfigError
from kvrs.tables import output, show


def explain(
    ctx: typer.Context,
    profile: opt.Profile = None,
    prompt_tokens: opt.PromptTokens = None,
    output_tokens: opt.OutputTokens = 0,
    bandwidth: opt.Bandwidth = "10Gbit/s",
    queue_depth: opt.QueueDepth = 0.0,
    checkpoint_tokens: opt.CheckpointTokens = 0,
    prefix_cache: opt.PrefixCache = False,
    as_json: base.Json = False,
) -> None:
    """Show one recovery decision, all options with their terms; or when loading beats computing."""
    given = locals()
    from kvrs_lab.explain.questions import break_even_document, decision_document

    if prompt_tokens is None:
        raise ConfigError("--prompt-tokens: missing; allowed: a whole number")
    if profile is None:
        _refuse_unused(ctx, "without --profile", ("as_json", "prompt_tokens"))
        document = break_even_document(prompt_tokens)
    else:
        document = decision_document(given)
    if not as_json:
        output().print(document.pop("sentence"), markup=False, highlight=False)
        del document["version"]
    show(document, as_json=as_json)


def _refuse_unused(ctx: typer.Context, given: str, used: Collection[str]) -> None:
    """Raises ConfigError: an option was given that belongs to another kind of question."""
    allowed = ", ".join(f"--{each.removeprefix('as_').replace('_', '-')}" for each in used)
    unused = [
        f"--{name.replace('_', '-')}: given {given}, which does not use it; allowed: {allowed}"
        for name in ctx.params
        if name not in used
        and (source := ctx.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if unused:
        raise ConfigError(unused)
