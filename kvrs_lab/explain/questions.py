"""The question of `kvrs lab explain`: from the options of its command line to the document that
answers it. Bytes, seconds and tokens throughout.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import inf, isfinite
from typing import Any

from kvrs.config.backup import BackupSettings
from kvrs.config.policy import PolicySettings
from kvrs.core import options
from kvrs.core.explanation import Question, explain
from kvrs.core.model.estimates import Option
from kvrs.errors import ConfigError, numbers_out_of_range
from kvrs.profiles import catalog
from kvrs.profiles.schema import Profile

_BANDWIDTH = re.compile(
    r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(Ki|Mi|Gi|Ti|[kMGT]?)(bit|B|b)(?:/s|ps)"
)
_FACTOR = re.compile(r"[0-9]+(\.[0-9]+)?")
_MAX_TOKENS = 1 << 24
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
    profile, table = _profile(given["profile"]), catalog.prefill_table(given["profile"])
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
