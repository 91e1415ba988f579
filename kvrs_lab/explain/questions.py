"""The questions of `kvrs lab explain`: from the options of its command line to the documents that
answer them. Bytes, seconds and tokens throughout.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import inf, isfinite
from typing import Any

from kvrs.config.backup import BackupSettings
from kvrs.config.engine import ExpertSettings
from kvrs.config.policy import PolicySettings
from kvrs.core import options
from kvrs.core.explanation import Question, explain
from kvrs.core.model.estimates import Option
from kvrs.errors import ConfigError, numbers_out_of_range
from kvrs.profiles import catalog
from kvrs.profiles.schema import Profile
from kvrs.protocol.speculation import MOST_DRAFTS
from kvrs_engine.elastic.shapes import shape_of
from kvrs_lab.explain.drafts import DraftQuestion, explain_drafts
from kvrs_lab.explain.elastic import (
    CONTRADICTIONS,
    RAIDSERVE_HOST_BYTES_PER_S,
    ElasticQuestion,
    KvBackup,
    explain_elastic,
)

_BANDWIDTH = re.compile(
    r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(Ki|Mi|Gi|Ti|[kMGT]?)(bit|B|b)(?:/s|ps)"
)
_TOKENS = re.compile(r"([0-9]{1,9})(k?)")
_FACTOR = re.compile(r"[0-9]+(\.[0-9]+)?")
_MAX_TOKENS = 1 << 24
# Options of models with experts, their usual values and the largest ones.
_OF_EXPERTS = {"zipf": (1.0, 8), "room_share": (ExpertSettings().room_share, 8)}
_CORRECTED = {each.option for each in options.ALL}
# Of the profile, and of the question all but those that the profile and the policy stand for.
_LABELS = ("label", "model", "dtype", "gpu", "cpu", "tp", "engine", "version", "kind", "source")
_ASKED = tuple(
    each.name for each in fields(Question) if each.name not in ("geometry", "prefill", "settings")
)


def decision_document(given: Mapping[str, Any]) -> dict[str, Any]:
    """One decision. `given`: the options by name; those without a default may be None.

    Raises:
        ConfigError: there is no such profile; or other options are wrong, all named at once.
    """
    profile, table = _profile(given, "profile"), catalog.prefill_table(given["profile"])
    _check(_faults_of_decision(given))
    prompt_tokens, service_s = given["prompt_tokens"], given["service_s"]
    if service_s is None and (service_s := table.seconds_for(prompt_tokens)) <= 0:
        raise ConfigError(
            f"--service-s: the profile's prefill takes {service_s} s; allowed: a time above 0"
        )
    held, queue_s = given["held_tokens"], given["queue_s"]
    host_bytes_per_s = BackupSettings().host_to_device_bytes_per_s
    parsed = {
        "held_tokens": prompt_tokens if held is None else held,
        "bytes_per_s": parse_bandwidth(given["bandwidth"], "--bandwidth"),
        "local_bytes_per_s": _local_bytes_per_s(given, profile),
        "service_s": service_s,
        "queue_s": (given["queue_depth"] or 0.0) * service_s if queue_s is None else queue_s,
        "host_to_device_bytes_per_s": _host_bytes_per_s(given, host_bytes_per_s),
        "own_queue_s": given["own_queue_depth"] * service_s,
        "corrections": dict(map(_parse_correction, given["correct"] or ())),
    }
    question = Question(
        geometry=profile.geometry,
        prefill=table,
        settings=PolicySettings(name=given["policy"]),
        **{name: parsed[name] if name in parsed else given[name] for name in _ASKED},
    )
    return {
        "version": 1,
        "profile": {name: getattr(profile, name) for name in _LABELS},
        "question": {name: getattr(question, name) for name in _ASKED},
        "answer": explain(question),
    }


def elastic_document(given: Mapping[str, Any]) -> dict[str, Any]:
    """The loss of ranks of one instance. `given`: the options by name.

    Raises:
        ConfigError: there is no such profile; or other options are wrong, all named at once.
    """
    profile = _profile(given, "elastic")
    _check(_faults_of_elastic(given, profile.model))
    of_experts = {
        name: usual if given[name] is None else given[name]
        for name, (usual, _) in _OF_EXPERTS.items()
        if shape_of(profile.model).experts > 1
    }
    question = ElasticQuestion(
        profile=given["elastic"],
        tp=given["tp"],
        lost=given["lost"],
        requests=given["requests"],
        context_tokens=_tokens(given["context"]),
        has_backup=given["backup"] is KvBackup.HOST,
        host_bytes_per_s=_host_bytes_per_s(given, RAIDSERVE_HOST_BYTES_PER_S),
        peer_bytes_per_s=_local_bytes_per_s(given, profile),
        bytes_per_s=parse_bandwidth(given["bandwidth"], "--bandwidth"),
        **of_experts,
    )
    answer = explain_elastic(question)
    return {"version": 1, "question": question, "answer": answer, "notes": CONTRADICTIONS}


def drafts_document(given: Mapping[str, Any]) -> dict[str, Any]:
    """A draft model while an instance loads again. `given`: the options by name.

    Raises:
        ConfigError: there is no such profile, or it lacks a table; or other options are wrong, all
            named at once.
    """
    for name in ("profile", "draft"):
        _profile(given, name)
    _check(_faults_of_drafts(given))
    question = DraftQuestion(
        profile=given["profile"],
        draft=given["draft"],
        acceptance=given["acceptance"],
        depth=given["depth"],
        batch=given["batch"],
        context_tokens=_tokens(given["context"]),
        disk_bytes_per_s=parse_bandwidth(given["disk"], "--disk"),
    )
    return {"version": 1, "question": question, "answer": explain_drafts(question)}


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
        base: float = 1024 if prefix.endswith("i") else 1000
        power = " KMGT".index(prefix[:1].upper() or " ")
        bytes_per_s = float(number) * base**power / (1 if unit == "B" else 8)
        if isfinite(bytes_per_s) and bytes_per_s > 0:
            return bytes_per_s
    allowed = (
        f"a rate above 0 with its unit (25Gbit/s, 3.1GB/s, 800Mbps), or a link: "
        f"{', '.join(catalog.links())}"
    )
    raise ConfigError(f"{option}: got {text!r}; allowed: {allowed}")


def _profile(given: Mapping[str, Any], name: str) -> Profile:
    try:
        return catalog.profile(given[name])
    except ConfigError as error:
        raise ConfigError([f"--{name}: {line}" for line in error.faults]) from None


def _check(faults: Iterator[str]) -> None:
    if wrong := [*faults]:
        raise ConfigError(wrong)


def _faults_of_decision(given: Mapping[str, Any]) -> Iterator[str]:
    prompt_tokens, output_tokens = given["prompt_tokens"], given["output_tokens"]
    history_tokens = max(0, prompt_tokens) + max(0, output_tokens)
    yield from _out_of_range(given, "prompt_tokens", 1, _MAX_TOKENS)
    yield from _out_of_range(given, "output_tokens", 0, _MAX_TOKENS)
    yield from _out_of_range(given, "held_tokens", 0, max(0, prompt_tokens))
    yield from _out_of_range(given, "checkpoint_tokens", 0, history_tokens)
    yield from _out_of_range(given, "reused_tokens", 0, history_tokens)
    yield from _out_of_range(given, "staging_bytes", 1, 1 << 40)
    times = ("queue_depth", "queue_s", "target_queue_s", "own_queue_depth", "budget_s", "others")
    yield from numbers_out_of_range([(_flag(name), given[name]) for name in times], zero=True)
    yield from numbers_out_of_range([("--service-s", given["service_s"])], zero=False)
    if given["queue_depth"] is not None and given["queue_s"] is not None:
        yield "--queue-depth, --queue-s: got both; allowed: one of them"
    yield from _faults_of_bandwidths(given)
    for text in given["correct"] or ():
        try:
            _parse_correction(text)
        except ConfigError as error:
            yield from error.faults


def _faults_of_elastic(given: Mapping[str, Any], model: str) -> Iterator[str]:
    for name, (_, most) in _OF_EXPERTS.items():
        if given[name] is None:
            continue
        if shape_of(model).experts == 1:
            yield f"{_flag(name)}: got {given[name]}; allowed: none, {model} has no experts"
        elif not 0 <= given[name] <= most:  # Also of what is no number.
            yield f"{_flag(name)}: got {given[name]}; allowed: 0 to {most}"
    yield from _out_of_range(given, "tp", 2, 1 << 10)
    yield from _out_of_range(given, "lost", 1, max(1, given["tp"] - 1))
    yield from _out_of_range(given, "requests", 1, 1 << 16)
    yield from _faults_of_context(given)
    yield from _faults_of_bandwidths(given)


def _faults_of_drafts(given: Mapping[str, Any]) -> Iterator[str]:
    if not 0 <= given["acceptance"] <= 1:  # Also of what is no number.
        yield f"--acceptance: got {given['acceptance']}; allowed: 0 to 1"
    yield from _out_of_range(given, "depth", 1, MOST_DRAFTS)
    yield from _out_of_range(given, "batch", 1, 1 << 16)
    yield from _faults_of_context(given)
    try:
        parse_bandwidth(given["disk"], "--disk")
    except ConfigError as error:
        yield from error.faults


def _faults_of_context(given: Mapping[str, Any]) -> Iterator[str]:
    if not 1 <= _tokens(given["context"]) <= _MAX_TOKENS:
        yield (
            f"--context: got {given['context']!r}; allowed: 1 to {_MAX_TOKENS} tokens, as 16384 "
            f"or 16k"
        )


def _out_of_range(given: Mapping[str, Any], name: str, low: int, high: int) -> Iterator[str]:
    value = given[name]
    if value is not None and not low <= value <= high:
        yield f"{_flag(name)}: got {value}; allowed: {low} to {high}"


def _faults_of_bandwidths(given: Mapping[str, Any]) -> Iterator[str]:
    for name in ("bandwidth", "local_bandwidth", "host_bandwidth"):
        try:
            if given[name] is not None:
                parse_bandwidth(given[name], _flag(name))
        except ConfigError as error:
            yield from error.faults


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _tokens(text: str) -> int:
    """Tokens of '16384' or '16k'; 0: it is neither."""
    found = _TOKENS.fullmatch(text)
    return 0 if found is None else int(found[1]) * (1024 if found[2] else 1)


def _parse_correction(text: str) -> tuple[Option, float]:
    """'migrate=1.5' of `--correct`.

    Raises:
        ConfigError: there is no such option, or the factor is none.
    """
    name, _, number = text.partition("=")
    factor = float(number) if _FACTOR.fullmatch(number) else inf
    if name in _CORRECTED and 0.01 <= factor <= 100:
        return Option(name), factor
    names = ", ".join(option for option in Option if option in _CORRECTED)
    allowed = f"OPTION=FACTOR, of {names}, from 0.01 to 100"
    raise ConfigError(f"--correct: got {text!r}; allowed: {allowed}")


def _host_bytes_per_s(given: Mapping[str, Any], otherwise: float) -> float:
    """From the memory of the host into a GPU."""
    text = given["host_bandwidth"]
    return otherwise if text is None else parse_bandwidth(text, "--host-bandwidth")


def _local_bytes_per_s(given: Mapping[str, Any], profile: Profile) -> float:
    """Between GPUs of a node: as given, or of the profile's GPU, or the policy's assumption."""
    if given["local_bandwidth"] is not None:
        return parse_bandwidth(given["local_bandwidth"], "--local-bandwidth")
    for link in catalog.links().values():
        if link.scope == "intra_node" and (profile.gpu or "").startswith(link.gpu):
            return link.transfer.bytes_per_s
    return PolicySettings().assumed_link_bytes_per_s
