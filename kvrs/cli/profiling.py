"""`kvrs profile` measures the prefill and decode times of an engine."""

import os
from pathlib import Path
from typing import Annotated

import typer

import kvrs.cli.options as opt
from kvrs.cli.common import console, say
from kvrs.cli.extras import profile_engine
from kvrs.errors import ConfigError


def profile(
    context: typer.Context,
    out: opt.ProfileOut,
    url: opt.ProfiledUrl = None,
    model: opt.Model = None,
    device: Annotated[
        opt.Device, typer.Option(help="Embedded engine: device that computes")
    ] = opt.Device.CPU,
    longest_tokens: opt.LongestTokens = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Embedded engine: largest decode batch")
    ] = 16,
    max_batch_tokens: opt.MaxBatchTokens = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per point; the median counts")] = 3,
) -> None:
    """Measure the embedded engine on this machine or, with --url, prefills of a running vLLM."""
    given = locals()
    if url is not None:
        engine_only = ("device", "max_batch", "max_batch_tokens")
        sources = {each: context.get_parameter_source(each) for each in engine_only}
        asked = [key for key, source in sources.items() if source and source.name == "COMMANDLINE"]
        if asked:
            option = f"--{asked[0].replace('_', '-')}"
            raise ConfigError(f"{option}: given beside --url; allowed: for the embedded engine")
        _profile_vllm(url, out, model, longest_tokens, repeats)
        return
    say(f"profile: {profile_engine(given)}")


def _profile_vllm(
    url: str,
    out: Path,
    model: Path | None,
    longest_tokens: int | None,
    repeats: int,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvrs.proxy.backends.vllm_profile import VllmProfileOptions, run_vllm_profile

    options = VllmProfileOptions(
        url=url,
        out=out,
        model=None if model is None else str(model),
        longest_tokens=longest_tokens,
        repeats=repeats,
    )
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("prompts", total=None)
        written = run_vllm_profile(
            options,
            os.environ,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    say(f"profile: {written}; profiles.prefill takes this path")
