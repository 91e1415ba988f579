"""`kvrs explain --elastic`: the loss of ranks of one instance, for people or as JSON."""

import re
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from rich.console import Console
from rich.table import Table

from kvrs.errors import ConfigError
from kvrs.explain.elastic import (
    CONTRADICTIONS,
    RAIDSERVE_HOST_BYTES_PER_S,
    ElasticAnswer,
    ElasticQuestion,
    explain_elastic,
)
from kvrs.explain.show import local_bytes_per_s, parse_bandwidth
from kvrs.profiles import catalog
from kvrs.tables import output

_TOKENS = re.compile(r"([0-9]{1,9})(k?)")
_MAX_REQUESTS = 1 << 16
_MAX_CONTEXT_TOKENS = 1 << 24
_MAX_RANKS = 1 << 10


class KvBackup(StrEnum):
    OFF = "off"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """The options of the command line."""

    elastic: str  # A profile, by name or path.
    tp: int = 8
    lost: int = 1
    requests: int = 56
    context: str = "16k"  # Tokens of each request; k: 1,024.
    backup: KvBackup = KvBackup.OFF
    host_bandwidth: str | None = None
    local_bandwidth: str | None = None
    bandwidth: str = "10Gbit/s"  # To the node of another instance.
    json: bool = False


def run_explain_elastic(options: ElasticOptions, console: Console | None = None) -> None:
    """Print the plan and the ladder.

    Raises:
        ConfigError: an option is wrong; all of them are named at once.
    """
    question = ask_elastic(options)
    answer = explain_elastic(question)
    if options.json:
        found = {"version": 1, "question": question, "answer": answer, "notes": CONTRADICTIONS}
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _show(question, answer, console or output())


def ask_elastic(options: ElasticOptions) -> ElasticQuestion:
    """Raises ConfigError."""
    wrong = [
        f"{name}: got {value}; allowed: {low} to {high}"
        for name, value, low, high in (
            ("--tp", options.tp, 2, _MAX_RANKS),
            ("--lost", options.lost, 1, max(1, options.tp - 1)),
            ("--requests", options.requests, 1, _MAX_REQUESTS),
        )
        if not low <= value <= high
    ]
    if (tokens := _tokens(options.context)) is None:
        wrong.append(
            f"--context: got {options.context!r}; allowed: 1 to {_MAX_CONTEXT_TOKENS} tokens, as "
            f"16384 or 16k"
        )
    try:
        profile = catalog.profile(options.elastic)
    except ConfigError as error:
        raise ConfigError([*wrong, *(f"--elastic: {line}" for line in error.faults)]) from None
    if wrong or tokens is None:
        raise ConfigError(wrong)
    return ElasticQuestion(
        profile=options.elastic,
        tp=options.tp,
        lost=options.lost,
        requests=options.requests,
        context_tokens=tokens,
        has_backup=options.backup is KvBackup.HOST,
        host_bytes_per_s=RAIDSERVE_HOST_BYTES_PER_S
        if options.host_bandwidth is None
        else parse_bandwidth(options.host_bandwidth, "--host-bandwidth"),
        peer_bytes_per_s=local_bytes_per_s(options.local_bandwidth, profile),
        bytes_per_s=parse_bandwidth(options.bandwidth, "--bandwidth"),
    )


def _tokens(text: str) -> int | None:
    if (found := _TOKENS.fullmatch(text)) is None:
        return None
    tokens = int(found[1]) * (1024 if found[2] else 1)
    return tokens if 1 <= tokens <= _MAX_CONTEXT_TOKENS else None


def _show(question: ElasticQuestion, answer: ElasticAnswer, console: Console) -> None:
    console.print(
        f"{question.profile}: TP {question.tp}, {question.lost} lost, {answer.survivors} left; "
        f"{question.requests} requests of {question.context_tokens:,} tokens; "
        f"weights {answer.weight_bytes / 1e9:.1f} GB, KV {answer.kv_bytes / 1e9:.1f} GB; "
        f"host {question.host_bytes_per_s / 1e9:.3g} GB/s and peers "
        f"{question.peer_bytes_per_s / 1e9:.3g} GB/s a rank",
        markup=False,
    )
    console.print(_plan_table(answer))
    console.print(_ladder(question, answer))
    console.print(_ways(question, answer))
    ours = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in answer.raidserve_s.items())
    console.print(
        f"RaidServe's rounded figures (140 GB, 280 GB, 50 GB/s) through the same planners: {ours}; "
        f"measured there: 0.53 s and 0.12 s"
    )
    for line in CONTRADICTIONS:
        console.print(f"published: {line}", style="dim", markup=False)


def _ways(question: ElasticQuestion, answer: ElasticAnswer) -> Table:
    table = Table("the instance", "its streams", "how many", "first, s", "last, s")
    for column in table.columns[2:]:
        column.justify = "right"
    for way in answer.ways:
        name = f"{way.way}: {way.ranks} ranks serve after {way.ready_s:.3f} s"
        if way.step_factor > 1:
            name += f", steps x {way.step_factor:.2f}"
        if way.is_chosen:
            name += " <- taken"
        for each in way.options:
            seconds = ("" if s is None else f"{s:.3f}" for s in (each.first_s, each.last_s))
            table.add_row(name, each.option.value, str(each.streams), *seconds)
            name = ""
        if way.waiting:
            table.add_row(name, "leave, but wait for a slot", str(way.waiting), "", "")
        table.add_section()
    table.caption = (
        "by the policy `auto`, seconds to the next token as predicted for the first stream and for "
        f"the last; another node with an idle instance, {question.bytes_per_s / 1e9:.3g} GB/s away"
    )
    return table


def _plan_table(answer: ElasticAnswer) -> Table:
    table = Table("moved on demand", "from the host, bytes", "between ranks, bytes")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in answer.moved:
        table.add_row(each.kind, f"{each.host_bytes:,}", f"{each.peer_bytes:,}")
    table.add_row(
        "all",
        f"{sum(each.host_bytes for each in answer.moved):,}",
        f"{sum(each.peer_bytes for each in answer.moved):,}",
    )
    return table


def _ladder(question: ElasticQuestion, answer: ElasticAnswer) -> Table:
    table = Table("way", "host GB on one link", "peers GB", "move s", "recompute s", "s", "")
    for column in table.columns[1:6]:
        column.justify = "right"
    for rung in answer.ladder:
        table.add_row(
            rung.way,
            f"{rung.host_bytes / 1e9:.2f}",
            f"{rung.peer_bytes / 1e9:.2f}",
            f"{rung.moving_s:.3f}",
            f"{rung.recompute_s:.1f}",
            f"{rung.total_s:.3f}",
            "" if rung.published_s is None else f"RaidServe: {rung.published_s:g} s",
        )
    backup = "KV is in the host's memory" if question.has_backup else "KV has no backup"
    table.caption = f"{backup}; the quickest: {answer.ladder[0].way}"
    return table
