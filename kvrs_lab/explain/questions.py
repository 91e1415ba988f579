"""The question of `kvrs lab explain`, from command-line options to the answer as a document, in
bytes, seconds and tokens.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import isfinite
from typing import Any

from kvrs.config.backup import BackupSettings
from kvrs.config.policy import PolicySettings
from kvrs.core.model.estimates import Option
from kvrs.errors import ConfigError, numbers_out_of_range
from kvrs.profiles import catalog
from kvrs.profiles.catalog import Profile
from kvrs_lab.explain.explanation import Explanation, Question, Weighed, explain

_BANDWIDTH = re.compile(
    r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(Ki|Mi|Gi|Ti|[kMGT]?)(bit|B|b)(?:/s|ps)"
)
_MAX_TOKENS = 1 << 24
# Engines whose instances declare no ability to fetch pages, to retain or to split
# (`kvrs/proxy/backends`). With a checkpoint in question they load rows that agents serve.
_STOCK = ("vllm", "sglang")
_RATES = ("10Gbit/s", "25Gbit/s", "100Gbit/s", "400Gbit/s")
# Fields of the profile, and fields of the question that neither profile nor policy gives.
_LABELS = ("label", "model", "dtype", "gpu", "cpu", "tp", "engine", "version", "kind", "source")
_ASKED = tuple(
    each.name for each in fields(Question) if each.name not in ("geometry", "prefill", "settings")
)


def decision_document(given: Mapping[str, Any]) -> dict[str, Any]:
    """Explain one decision. `given` has the options by name; those without a default may be None.

    Raises:
        ConfigError: an unknown profile, or other wrong options, all named at once.
    """
    profile, table = _profile(given["profile"]), catalog.prefill_table(given["profile"])
    _check(_faults_of_decision(given))
    prompt_tokens = given["prompt_tokens"]
    if (service_s := table.seconds_for(prompt_tokens)) <= 0:
        raise ConfigError(f"--profile: a prefill takes {service_s} s; allowed: a time above 0")
    question = Question(
        geometry=profile.geometry,
        prefill=table,
        settings=PolicySettings(),
        prompt_tokens=prompt_tokens,
        output_tokens=given["output_tokens"],
        held_tokens=prompt_tokens,
        bytes_per_s=parse_bandwidth(given["bandwidth"], "--bandwidth"),
        local_bytes_per_s=_local_bytes_per_s(profile),
        service_s=service_s,
        queue_s=given["queue_depth"] * service_s,
        checkpoint_tokens=given["checkpoint_tokens"],
        host_to_device_bytes_per_s=BackupSettings().host_to_device_bytes_per_s,
        prefix_cache=_has_prefix_cache_alone(profile, given["prefix_cache"]),
    )
    answer = explain(question)
    return {
        "version": 1,
        "sentence": _sentence(answer),
        "profile": {name: getattr(profile, name) for name in _LABELS},
        "question": {name: getattr(question, name) for name in _ASKED},
        "answer": answer,
    }


def _sentence(answer: Explanation) -> str:
    (chosen,) = (each for each in answer.options if each.is_chosen)
    others = [f"{_way(each)} {each.total_s:.3g} s" for each in answer.options if each is not chosen]
    against = f"; by others: {', '.join(others)}" if others else ""
    words = f"{answer.policy} chooses {_way(chosen)}: next token after {chosen.total_s:.3g} s"
    return words + against


def _way(option: Weighed) -> str:
    # Only this option is weighed at two instances.
    return f"recompute at {option.at}" if option.option is Option.RECOMPUTE else option.option.value


def break_even_document(tokens: int) -> dict[str, Any]:
    """For each profile: the seconds to compute a history of `tokens`, the seconds to load it at
    some rates, and the bytes per second at which both are equal.
    """
    _check(_out_of_range({"prompt_tokens": tokens}, "prompt_tokens", 1, _MAX_TOKENS))
    rows, even = [], dict[str, float]()
    for name in catalog.names():
        kv_bytes = tokens * catalog.profile(name).geometry.bytes_per_token
        prefill_s = catalog.prefill_table(name).seconds_for(tokens)
        row = {"profile": name, "kv_bytes": kv_bytes, "prefill_s": prefill_s}
        row["even_bytes_per_s"] = even[name] = kv_bytes / prefill_s
        row |= {f"load_s at {rate}": kv_bytes / parse_bandwidth(rate, "") for rate in _RATES}
        rows.append(row)
    ends = min(even, key=even.__getitem__), max(even, key=even.__getitem__)
    least, most = (f"{even[name] / 1e9:.3g} GB/s ({name})" for name in ends)
    sentence = (
        f"loading the KV of {tokens:,} tokens is faster than computing it above {least} to {most}, "
        f"depending on model and GPU"
    )
    return {"version": 1, "sentence": sentence, "history_tokens": tokens, "break_even": rows}


def parse_bandwidth(text: str, option: str) -> float:
    """Parse '25Gbit/s', '3.1GB/s', '800 Mbps', '1GiB/s', or the name of a link of kvrs into bytes
    per second.

    Raises:
        ConfigError: the text has another form.
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


def _profile(name: str) -> Profile:
    try:
        return catalog.profile(name)
    except ConfigError as error:
        raise ConfigError([f"--profile: {line}" for line in error.faults]) from None


def _check(faults: Iterator[str]) -> None:
    if wrong := [*faults]:
        raise ConfigError(wrong)


def _faults_of_decision(given: Mapping[str, Any]) -> Iterator[str]:
    prompt_tokens, output_tokens = given["prompt_tokens"], given["output_tokens"]
    history_tokens = max(0, prompt_tokens) + max(0, output_tokens)
    yield from _out_of_range(given, "prompt_tokens", 1, _MAX_TOKENS)
    yield from _out_of_range(given, "output_tokens", 0, _MAX_TOKENS)
    yield from _out_of_range(given, "checkpoint_tokens", 0, history_tokens)
    yield from numbers_out_of_range([("--queue-depth", given["queue_depth"])], zero=True)
    try:
        parse_bandwidth(given["bandwidth"], "--bandwidth")
    except ConfigError as error:
        yield from error.faults


def _out_of_range(given: Mapping[str, Any], name: str, low: int, high: int) -> Iterator[str]:
    value = given[name]
    if not low <= value <= high:
        yield f"--{name.replace('_', '-')}: got {value}; allowed: {low} to {high}"


def _has_prefix_cache_alone(profile: Profile, asked: bool | None) -> bool:
    return profile.engine.lower().startswith(_STOCK) if asked is None else asked


def _local_bytes_per_s(profile: Profile) -> float:
    """The rate between GPUs of a node: that of the profile's GPU, or the policy's assumption."""
    for link in catalog.links().values():
        if link.scope == "intra_node" and (profile.gpu or "").startswith(link.gpu):
            return link.transfer.bytes_per_s
    return PolicySettings().assumed_link_bytes_per_s
