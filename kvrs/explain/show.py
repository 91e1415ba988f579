"""`kvrs explain`: one recovery decision with every term, for people or as JSON."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvrs.config.backup import BackupSettings
from kvrs.config.policy import PolicyName, PolicySettings
from kvrs.errors import ConfigError, numbers_out_of_range
from kvrs.explain.decision import CheckpointAt, Explanation, Question, explain
from kvrs.policy import options
from kvrs.policy.model.estimates import Option
from kvrs.profiles import catalog
from kvrs.profiles.schema import Profile
from kvrs.tables import folded, output

_PREFIX = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_BANDWIDTH = re.compile(
    r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(Ki|Mi|Gi|Ti|[kMGT]?)(bit|B|b)(?:/s|ps)"
)
_MAX_TOKENS = 1 << 24
_WEIGHED = {each.option for each in options.ALL}
_CORRECTED = [option.value for option in Option if option in _WEIGHED]
_FACTOR = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """The options of the command line."""

    profile: str  # By name or path.
    prompt_tokens: int
    output_tokens: int = 0
    bandwidth: str = "10Gbit/s"  # With its unit, or the name of a link that comes with kvrs.
    # None: the profile's GPU within a node, where that is known; else the policy's assumption.
    local_bandwidth: str | None = None
    queue_depth: float | None = None  # Requests ahead at the prefill instance beside the target,
    queue_s: float | None = None  # or how long it takes until they are done.
    service_s: float | None = None  # Per request ahead. None: what this prompt's own prefill takes.
    target_queue_s: float = 0.0
    held_tokens: int | None = None  # None: the whole prompt.
    checkpoint_tokens: int = 0  # Of the history, prompt and output, at an agent.
    checkpoint_at: CheckpointAt = CheckpointAt.TARGET
    # From an agent's memory into an instance on its node. None: what `backup` assumes.
    host_bandwidth: str | None = None
    reused_tokens: int = 0  # Of the history, at the target already.
    own_queue_depth: float = 0.0  # Requests ahead at the own decode instance at the hand-off.
    prefix_cache: bool = False  # For engines such as vLLM.
    corrections: Sequence[str] = ()  # Each as OPTION=FACTOR.
    budget_s: float | None = None
    others: float = 0.0  # Other victims of the event, for each target.
    policy: PolicyName = PolicyName.AUTO
    json: bool = False


def run_explain(options: ExplainOptions, console: Console | None = None) -> None:
    """Print the decision.

    Raises:
        ConfigError: an option is wrong; all of them are named at once.
    """
    profile, question = ask(options)
    explanation = explain(question)
    if options.json:
        print(
            msgspec.json.format(
                msgspec.json.encode(as_json(profile, question, explanation)), indent=2
            ).decode()
        )
    else:
        _show(profile, question, explanation, console or output())


def ask(options: ExplainOptions) -> tuple[Profile, Question]:
    """The question that the options state, and the profile it is about.

    Raises:
        ConfigError: an option is wrong.
    """
    if wrong := [*_faults(options)]:
        raise ConfigError(wrong)
    try:
        profile, table = catalog.profile(options.profile), catalog.prefill_table(options.profile)
    except ConfigError as error:
        raise ConfigError([f"--profile: {line}" for line in error.faults]) from None
    settings = PolicySettings(name=options.policy)
    service_s = (
        options.service_s
        if options.service_s is not None
        else table.seconds_for(options.prompt_tokens)
    )
    if service_s <= 0:
        raise ConfigError(
            [f"--service-s: the profile's prefill takes {service_s} s; allowed: a time above 0"]
        )
    queue_s = (
        options.queue_s if options.queue_s is not None else (options.queue_depth or 0.0) * service_s
    )
    return profile, Question(
        geometry=profile.geometry,
        prefill=table,
        settings=settings,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        held_tokens=options.prompt_tokens if options.held_tokens is None else options.held_tokens,
        bytes_per_s=parse_bandwidth(options.bandwidth, "--bandwidth"),
        local_bytes_per_s=local_bytes_per_s(options.local_bandwidth, profile),
        service_s=service_s,
        queue_s=queue_s,
        target_queue_s=options.target_queue_s,
        budget_s=options.budget_s,
        others=options.others,
        checkpoint_tokens=options.checkpoint_tokens,
        checkpoint_at=options.checkpoint_at,
        host_to_device_bytes_per_s=_host_bytes_per_s(options),
        reused_tokens=options.reused_tokens,
        own_queue_s=options.own_queue_depth * service_s,
        prefix_cache=options.prefix_cache,
        corrections=dict(map(_parse_correction, options.corrections)),
    )


def parse_bandwidth(text: str, option: str) -> float:
    """Bytes per second of '25Gbit/s', '3.1GB/s', '800 Mbps', '1GiB/s', or of a link that comes with
    kvrs.

    Raises:
        ConfigError: it is none of them.
    """
    if (link := catalog.links().get(text)) is not None:
        return link.transfer.bytes_per_s
    if found := _BANDWIDTH.fullmatch(text.strip()):
        number, prefix, unit = found.groups()
        bytes_per_s = float(number) * _PREFIX[prefix] / (1 if unit == "B" else 8)
        if isfinite(bytes_per_s) and bytes_per_s > 0:
            return bytes_per_s
    allowed = (
        f"a rate above 0 with its unit (25Gbit/s, 3.1GB/s, 800Mbps), or a link: "
        f"{', '.join(catalog.links())}"
    )
    raise ConfigError([f"{option}: got {text!r}; allowed: {allowed}"])


def as_json(profile: Profile, question: Question, explanation: Explanation) -> dict[str, Any]:
    """Question and answer; bytes, seconds and tokens throughout."""
    labels = ("label", "model", "dtype", "gpu", "tp", "engine", "version", "kind", "source")
    asked = (
        *("prompt_tokens", "output_tokens", "held_tokens", "bytes_per_s", "local_bytes_per_s"),
        *(
            "queue_s",
            "service_s",
            "target_queue_s",
            "budget_s",
            "checkpoint_tokens",
            "checkpoint_at",
        ),
        *(
            "host_to_device_bytes_per_s",
            "reused_tokens",
            "own_queue_s",
            "prefix_cache",
            "corrections",
            "others",
        ),
    )
    return {
        "version": 1,
        "profile": {name: getattr(profile, name) for name in labels},
        "question": {name: getattr(question, name) for name in asked},
        "answer": explanation,
    }


def _faults(options: ExplainOptions) -> list[str]:
    held = options.prompt_tokens if options.held_tokens is None else options.held_tokens
    history = max(0, options.prompt_tokens) + max(0, options.output_tokens)
    whole = (
        ("--prompt-tokens", options.prompt_tokens, 1, _MAX_TOKENS),
        ("--output-tokens", options.output_tokens, 0, _MAX_TOKENS),
        ("--held-tokens", held, 0, max(0, options.prompt_tokens)),
        ("--checkpoint-tokens", options.checkpoint_tokens, 0, history),
        ("--reused-tokens", options.reused_tokens, 0, history),
    )
    wrong = [
        f"{name}: got {value}; allowed: {low} to {high}"
        for name, value, low, high in whole
        if not low <= value <= high
    ]
    times = (
        ("--queue-depth", options.queue_depth),
        ("--queue-s", options.queue_s),
        ("--target-queue-s", options.target_queue_s),
        ("--own-queue-depth", options.own_queue_depth),
        ("--budget-s", options.budget_s),
        ("--others", options.others),
    )
    wrong += numbers_out_of_range(times, zero=True)
    wrong += numbers_out_of_range([("--service-s", options.service_s)], zero=False)
    if options.queue_depth is not None and options.queue_s is not None:
        wrong.append("--queue-depth, --queue-s: got both; allowed: one of them")
    bandwidths = (
        ("--bandwidth", options.bandwidth),
        ("--local-bandwidth", options.local_bandwidth),
        ("--host-bandwidth", options.host_bandwidth),
    )
    for name, text in bandwidths:
        if text is not None:
            wrong += _faults_of(partial(parse_bandwidth, text, name))
    for text in options.corrections:
        wrong += _faults_of(partial(_parse_correction, text))
    return wrong


def _faults_of(parse: Callable[[], object]) -> list[str]:
    try:
        parse()
    except ConfigError as error:
        return error.faults
    return []


def _parse_correction(text: str) -> tuple[Option, float]:
    """'migrate=1.5' of `--correct`.

    Raises:
        ConfigError: there is no such option, or the factor is none.
    """
    name, _, number = text.partition("=")
    if (
        name in _CORRECTED
        and (found := _FACTOR.fullmatch(number)) is not None
        and 0.01 <= float(found[0]) <= 100
    ):
        return Option(name), float(number)
    allowed = f"OPTION=FACTOR, of {', '.join(_CORRECTED)}, from 0.01 to 100"
    raise ConfigError([f"--correct: got {text!r}; allowed: {allowed}"])


def _host_bytes_per_s(options: ExplainOptions) -> float:
    if options.host_bandwidth is not None:
        return parse_bandwidth(options.host_bandwidth, "--host-bandwidth")
    return BackupSettings().host_to_device_bytes_per_s


def local_bytes_per_s(given: str | None, profile: Profile) -> float:
    """Between GPUs of a node: as given, or of the profile's GPU, or the policy's assumption.

    Raises:
        ConfigError: what is given is no rate.
    """
    if given is not None:
        return parse_bandwidth(given, "--local-bandwidth")
    for link in catalog.links().values():
        if (
            link.scope == "intra_node"
            and profile.gpu is not None
            and profile.gpu.startswith(link.gpu)
        ):
            return link.transfer.bytes_per_s
    return PolicySettings().assumed_link_bytes_per_s


def _show(profile: Profile, question: Question, explanation: Explanation, console: Console) -> None:
    tp = f", TP {profile.tp}" if profile.tp is not None else ""
    console.print(
        f"{profile.label}: {profile.model} on {profile.gpu or profile.cpu}{tp}, "
        f"{profile.engine}, {profile.kind}",
        markup=False,
    )
    console.print(
        f"prompt {question.prompt_tokens:,} tokens, {question.output_tokens:,} produced, "
        f"{question.held_tokens:,} held "
        f"elsewhere; link {question.bytes_per_s / 1e9:.3g} GB/s; KV "
        f"{explanation.kv_bytes_per_token:,} bytes per token, "
        f"{explanation.kv_bytes / 1e9:.3g} GB for the prompt",
        style="dim",
    )
    console.print(folded(_table(explanation)))
    others = ", ".join(
        f"{name.value}: {option.value}" for name, option in explanation.by_policy.items()
    )
    console.print(f"by policy: {others}")
    for line in [*crossover_lines(explanation), *hand_off_lines(explanation)]:
        console.print(line)


def _table(explanation: Explanation) -> Table:
    table = Table("option", "term", "seconds", "how")
    table.columns[2].justify = "right"
    for weighed in explanation.options:
        for term in weighed.terms:
            table.add_row(weighed.option.value, term.name, f"{term.seconds:.6f}", term.how)
        note = "[yellow]beyond the table's range: extrapolated[/]" if weighed.extrapolated else ""
        mark = "[green]<- chosen[/]" if weighed.option is explanation.chosen else ""
        table.add_row(
            f"[bold]{weighed.option.value}[/]",
            "[bold]total[/]",
            f"[bold]{weighed.total_s:.6f}[/]",
            " ".join(filter(None, (note, mark))),
        )
        table.add_section()
    if explanation.chosen is Option.ABORT:
        table.add_row("[red]abort[/]", "", "", "[red]no option meets the budget[/]")
    table.caption = f"policy {explanation.policy.value}: {explanation.chosen.value}"
    return table


def crossover_lines(explanation: Explanation) -> list[str]:
    """The crossovers, in sentences."""
    crossover = explanation.crossover
    rate = crossover.bytes_per_s
    if all(weighed.option is not Option.MIGRATE for weighed in explanation.options):
        lines = ["crossover bandwidth: none, there is nothing to migrate"]
    elif rate is None:
        lines = ["crossover bandwidth: none, recomputing is cheaper over any link"]
    else:
        lines = [
            f"crossover bandwidth: {rate / 1e9:.4g} GB/s ({rate * 8 / 1e9:.4g} Gbit/s); "
            f"above it migrating is cheaper"
        ]
    if crossover.queue_depth is not None:
        lines.append(
            f"crossover queue depth: {crossover.queue_depth:.2f} requests before "
            f"recomputing; beyond it migrating is cheaper"
        )
    if not isfinite(crossover.hand_off_queue_depth):
        return [*lines, "hand-off crossover queue depth: none, the link is too slow for any queue"]
    lines.append(
        f"hand-off crossover queue depth: {crossover.hand_off_queue_depth:.2f} requests "
        f"in the own queue; "
        "beyond it moving the KV to an idle node is sooner"
    )
    return lines


def hand_off_lines(explanation: Explanation) -> list[str]:
    """The target of each hand-off rule at the end of prefill."""
    return [
        f"hand-off by {each.how.value}: {'own pair' if each.is_own else 'remote'} "
        f"(own {each.own_s:.6f} s, remote {each.remote_s:.6f} s)"
        for each in explanation.hand_offs
    ]
