"""Findings of `kvrs doctor`, one line per check.

Cluster checks of `kvrs doctor`, on the state of a proxy.

Model checks of `kvrs doctor`: its files on this machine, and the model of its profile.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import Any

import kvrs
from kvrs.config.backup import BackupMode
from kvrs.config.cluster import Backend
from kvrs.config.file import ADMIN_ENV_NAME, Config, config_digest
from kvrs.core.fleet.tested import Continues
from kvrs.core.model.estimates import Option
from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.profiles.catalog import Profile
from kvrs.profiles.guess import size_of
from kvrs.protocol.instance import Capability, Role
from kvrs.proxy.backends.model_config import geometry_of, read_config
from kvrs.proxy.backends.model_files import how_to_get


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. `allowed` and `remedy` are empty if nothing needs to be done."""

    check: str
    level: Level
    value: str
    allowed: str = ""
    remedy: str = ""


def good(check: str, value: str) -> Finding:
    return Finding(check, Level.OK, value)


def doubtful(check: str, value: str, allowed: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, value, allowed, remedy)


def bad(check: str, value: str, allowed: str, remedy: str) -> Finding:
    return Finding(check, Level.FAILURE, value, allowed, remedy)


def of_fault(fault: str, remedy: str, check: str = "configuration") -> Finding:
    """Make a finding of a fault of the configuration: path, value and allowed values."""
    value, _, allowed = fault.partition("; allowed: ")
    return bad(check, value, allowed, remedy)


def has_failed(findings: Iterable[Finding]) -> bool:
    return any(each.level is Level.FAILURE for each in findings)


PATIENCE_S = 5.0  # Seconds to wait until instances have started and peers are reachable.
_ASK_AGAIN_S = 0.5
_STARVED_SHOWN_S = 600.0  # Time for which a spell of starvation is shown after its end.
_KEYS = ("instances", "agents", "proxies", "members", "recoveries")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProxyAnswer:
    """Answer of a proxy's admin port: the proxy's state, or the reason why there is none."""

    url: str
    state: Mapping[str, Any] | None = None
    cause: str = ""
    # `is_taken`: the listener at the port gives no state; `is_locked`: it requires another token.
    is_taken: bool = False
    is_locked: bool = False


def ask(
    config: Config,
    environ: Mapping[str, str],
    patience_s: float = PATIENCE_S,
    url: str | None = None,
) -> ProxyAnswer:
    """Ask the proxy at the configured admin port, or at `url`, for its state; ask again for up to
    `patience_s` while an instance is starting or a peer of the proxy is unreachable.
    """
    from kvrs.net.admin import AdminClient, AdminError

    try:
        client = AdminClient.of(config, environ, url)
    except ConfigError as error:
        return ProxyAnswer("proxy.admin_port", cause="; ".join(error.faults))
    until_s = time.monotonic() + patience_s
    try:
        state = client.read("state", *_KEYS)
        while _is_starting(state) and time.monotonic() < until_s:
            time.sleep(_ASK_AGAIN_S)
            state = client.read("state", *_KEYS)
        return ProxyAnswer(client.url, state)
    except AdminError as error:
        is_locked = error.status == HTTPStatus.UNAUTHORIZED
        return ProxyAnswer(client.url, None, error.cause, error.is_taken, is_locked)


def _is_starting(state: Mapping[str, Any]) -> bool:
    is_late = any(row["health"] == "starting" for row in state["instances"])
    return is_late or bool(_peers_not_up(state["proxies"]))


def _peers_not_up(rows: list[Mapping[str, Any]]) -> list[str]:
    return sorted({name for row in rows for name, health in row["peers"].items() if health != "up"})


def cluster_findings(config: Config, answer: ProxyAnswer) -> Iterator[Finding]:
    if answer.state is None:
        yield _no_state(answer)
        return
    state = answer.state
    up = [row for row in state["instances"] if row["health"] == "up"]
    tests = _of_each(up, "self_test")
    yield from _proxies(config, state["proxies"], answer.url)
    yield from _judged("instances", "instance", state["instances"], _OF_INSTANCES)
    yield from _engine_versions(config, state["instances"])
    yield from _rows(config, up, state["agents"], state["recoveries"])
    yield from _judged("hand-offs", "hand-offs of", _of_each(up, "hand_offs"), _OF_HAND_OFFS)
    transfers = _of_each(up, "aborted_transfers")
    yield from _judged("aborted transfers", "aborted transfers of", transfers, _OF_TRANSFERS)
    yield from _judged("self-tests", "self-test of", tests, _OF_SELF_TESTS)
    if up and not tests:
        remedy = "proxy.self_test: true, and restart the proxy"
        yield doubtful("self-test", "off", "on: otherwise nothing is seen", remedy)
    yield from _judged("agents", "agent", state["agents"], _OF_AGENTS)
    yield from _judged("gossip", "gossip member", state["members"], _OF_MEMBERS)
    for check, is_wanted, key in (
        ("agents", config.agents_run, "agents"),
        ("gossip", config.gossip.enabled, "members"),
    ):
        if is_wanted and not state[key]:
            remedy = "restart the proxy with this configuration"
            yield bad(check, "none at the proxy", "those of the configuration", remedy)


def _no_state(answer: ProxyAnswer) -> Finding:
    value = f"no state from {answer.url} ({answer.cause}), so the cluster is not checked"
    if answer.is_taken:
        remedy = "end what listens there, or give the file of the proxy that runs as --config"
        if answer.is_locked:
            remedy = f"give its admin token ({ADMIN_ENV_NAME}), or its file as --config"
        return bad("proxy", value, "the admin port of a kvrs proxy", remedy)
    return doubtful("proxy", value, "a proxy that runs", "kvrs proxy --config FILE, or kvrs lab up")


def _proxies(config: Config, rows: list[Mapping[str, Any]], url: str) -> Iterator[Finding]:
    names = ", ".join(f"{row['id']} (pid {row['pid']})" for row in rows)
    yield good("proxy", f"{names} at {url}")
    versions = {str(row["version"]) for row in rows}
    if versions != {kvrs.__version__}:
        value = f"the proxy is kvrs {', '.join(sorted(versions))}, here is {kvrs.__version__}"
        yield doubtful("version", value, "the same version everywhere", "restart what is older")
    yield from filter(None, map(_starved, rows))
    # Not compared with workers, whose configurations are derived from the file.
    if config.proxy.workers == 1:
        yield _digest(config, rows[0])
    peers = {name for row in rows for name in row["peers"]}
    if down := _peers_not_up(rows):
        value = f"{', '.join(down)} of {len(peers)} cannot be reached: no stream is resumed there"
        remedy = (
            "start it, open its proxy.peer_port to this proxy, or give its entry in proxy.peers "
            "the `workers` that it has; `proxy not reached` in the proxy's log has the cause"
        )
        yield bad("peers of the proxy", value, "all up", remedy)
    elif peers:
        yield good("peers of the proxy", f"{len(peers)} of {len(peers)} up")


def _starved(row: Mapping[str, Any]) -> Finding | None:
    """Say that the proxy's own event loop is late, or was a moment ago."""
    starved = row.get("starved")
    if starved is None or (not starved["now"] and (starved["ago_s"] or inf) > _STARVED_SHOWN_S):
        return None
    when = "now" if starved["now"] else f"{starved['ago_s']:.0f} s ago"
    value = f"{row['id']} is starved ({when}, {starved['late_s']:.1f} s late): it hears late"
    remedy = "give it more CPU: a higher limit of its pod, a core of its own, proxy.workers"
    return doubtful("CPU of the proxy", value, "an event loop that runs on time", remedy)


def _digest(config: Config, row: Mapping[str, Any]) -> Finding:
    """Compare the digest of the proxy's configuration with that of this one; a proxy that `kvrs lab
    up` has started also reports the digest of that command's file.
    """
    running, here = str(row["config_digest"]), config_digest(config)
    if here in (running, row.get("source_digest")):
        return good("configuration in use", f"{here}, as here")
    return doubtful(
        "configuration in use",
        f"{running}, here {here}",
        "the same configuration",
        "give the file of the proxy, or of its `kvrs lab up`, as --config; if it has changed, "
        "reload or restart the proxy, or its `kvrs lab up`",
    )


# Classes and functions that judge the rows of a proxy's state.


@dataclass(frozen=True, slots=True)
class _Fault:
    """A fault that a row may have, and the finding to print for it. The texts may name fields of
    the row in braces.
    """

    is_of: Callable[[Row], Any]
    find: Callable[[str, str, str, str], Finding]
    value: str
    allowed: str
    remedy: str


def _is_denied(row: Row) -> bool:
    return any(f"HTTP {status}" in (row.get("reason") or "") for status in (401, 403))


def _is_coming(row: Row) -> bool:
    """True if the instance is starting and no fault is known: a model may load for minutes."""
    return bool(row["health"] == "starting" and not row.get("reason"))


def _replays(row: Row) -> bool:
    return Capability.REPLAY.value in row["capabilities"]


def _is_not_up(row: Row) -> bool:
    return bool(row["health"] != "up")


# Faults by kind of row, in order: the first that a row has is its finding.
_NOT_UP = "{health}{because}"
_OF_INSTANCES = (
    _Fault(_is_coming, doubtful, _NOT_UP, "up", "wait, then run this again"),
    _Fault(
        _is_denied,
        bad,
        _NOT_UP,
        "up",
        "give the proxy a key that the instance takes (KVRS_VLLM_API_KEY, KVRS_SGLANG_API_KEY), "
        "and restart the proxy",
    ),
    _Fault(
        lambda row: row["health"] == "refused",
        bad,
        _NOT_UP,
        "up",
        "make what listens at {url} what the configuration names; it is looked at every second",
    ),
    _Fault(_is_not_up, bad, _NOT_UP, "up", "start it at {url}, or see its log"),
    _Fault(
        lambda row: row.get("failing"),
        doubtful,
        "up, but the proxy's questions fail: {failing}",
        "answers to all questions of its watch",
        "see its log; what each failure costs is in `kvrs docs failures`",
    ),
)
_OF_HAND_OFFS = (
    _Fault(
        lambda row: row["differs_from"] and row["role"] != "prefill",
        bad,
        "{format}, none from {differs_from}",
        "one format of KV at both ends",
        "one version, model, --kv-cache-dtype and attention backend at both",
    ),
)
_OF_TRANSFERS = (
    _Fault(
        lambda row: row["are_held"] is False,
        bad,
        "its aborted requests' pages go to others while KV moves{because}",
        "they are kept until nothing writes them",
        "update the engine, or for SGLang set "
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=1 at prefill and decode where it has it",
    ),
    _Fault(
        lambda row: row["are_held"] is None,
        doubtful,
        "it is not known whether its aborted requests' pages are kept while KV moves{because}",
        "they are kept until nothing writes them",
        "see that the engine is SGLang 0.5.23, vLLM 0.32, or later",
    ),
)
_OF_SELF_TESTS = (
    _Fault(
        lambda row: not row["done"],
        doubtful,
        "not done{because}",
        "done",
        "wait, then run this again",
    ),
    _Fault(
        lambda row: row["continues"] == Continues.NONE,
        bad,
        "streams that it loses end{because}",
        "it continues streams",
        "see its version in `kvrs docs backends`",
    ),
    _Fault(
        lambda row: row["moves_kv"] is False,
        bad,
        "KV does not move, and is computed again{because}",
        "KV moves",
        "check the KV connector of both instances (vLLM, SGLang), or their page ports (embedded "
        "engine)",
    ),
    _Fault(
        lambda row: row["store"] is not None and row["store"]["is_wrong"],
        bad,
        "its store is wrong: new prompts may get what is none of theirs{because}",
        "the same tokens behind what it loads as without",
        "empty the store, see that all its servers have one model, and start this one again",
    ),
    _Fault(
        lambda row: row["store"] is not None and row["restores"] is False,
        doubtful,
        "nothing is restored from its store{because}",
        "it loads what another instance has stored",
        "see its log and that of the store; `kvrs docs vllm` says what to set",
    ),
    _Fault(
        lambda row: row["restores"] is False,
        bad,
        "rows of agents are not loaded, but computed again{because}",
        "rows of agents are loaded",
        "see the logs of vLLM and of the agents",
    ),
    _Fault(
        lambda row: row["failures"],
        doubtful,
        "not known{because}",
        "a test that ends",
        "see the log of the instance; if it was only slow, restart the proxy, which tests it again",
    ),
    _Fault(
        lambda row: row["continues"] == Continues.TEXT,
        doubtful,
        "continues: {continues}{because}",
        "exact, also sampled",
        "engines of one version, on equal GPUs, with deterministic kernels (`kvrs docs backends`)",
    ),
    _Fault(
        # A replay makes sampled streams exact too.
        lambda row: row["continues"] == Continues.GREEDY and not _replays(row),
        doubtful,
        "continues: {continues}{because}",
        "exact, also sampled",
        "for vLLM add --logits-processors kvrs.vllm.replay:Replay (`kvrs docs vllm`); an engine "
        "that has no such processor continues sampled streams inexactly (`kvrs docs backends`)",
    ),
)
_OF_AGENTS = (_Fault(_is_not_up, bad, _NOT_UP, "up", "start it, or see its log"),)
_OF_MEMBERS = (
    _Fault(
        lambda row: row["status"] != "alive", doubtful, "{status}", "alive", "open its gossip port"
    ),
)


def _of_each(rows: list[Row], key: str) -> list[Row]:
    """Return the value of `key` in each row that has one, together with the instance's id
    and role.
    """
    return [{**row[key], "id": row["id"], "role": row["role"]} for row in rows if row.get(key)]


def _judged(check: str, one: str, rows: list[Row], faults: Iterable[_Fault]) -> Iterator[Finding]:
    """Yield a finding for each row with a fault; without faults a single finding that all rows are
    good, and nothing without rows.
    """
    wrong = [
        (row, fault) for row in rows if (fault := next((f for f in faults if f.is_of(row)), None))
    ]
    if rows and not wrong:
        yield good(check, f"{len(rows)} of {len(rows)} well")
    for row, fault in wrong:
        because = row.get("reason") or row.get("cause")
        named = {
            key: ", ".join(it) if isinstance(it, list | dict) else it for key, it in row.items()
        }
        named["because"] = f" ({because})" if because else ""
        value, remedy = fault.value.format(**named), fault.remedy.format(**named)
        yield fault.find(f"{one} {row['id']}", value, fault.allowed, remedy)


# Versions of stock engines with which all tests of this version of kvrs have run
# (docs/guide/upgrades.md). A version that begins like one of them counts as that one.
TESTED = {Backend.VLLM: ("0.32",), Backend.SGLANG: ("0.5.23",)}


def _engine_versions(config: Config, rows: list[Row]) -> Iterator[Finding]:
    """Yield a finding for each version of a stock engine that the instances have."""
    backend = config.cluster.backend
    tested = TESTED.get(backend, ())
    of_each = {row["id"]: row.get("engine_version") for row in rows}
    for version in sorted({found for found in of_each.values() if found}):
        names = ", ".join(name for name, found in of_each.items() if found == version)
        value = f"{backend} {version} at {names}"
        if any(version == each or version.startswith(f"{each}.") for each in tested):
            yield good("engine version", value)
        else:
            remedy = f"make check-{backend} ENGINE_VERSION={version} (kvrs docs upgrades)"
            yield doubtful("engine version", value, f"tested: {', '.join(tested)}", remedy)


# By engine: the option by which servers share rows, the page that describes it, and the roles of
# the instances that share.
_SHARING = {
    Backend.VLLM: ("vLLM with KvrsOffloading there", "vllm", (Role.DECODE, Role.BOTH)),
    Backend.SGLANG: ("SGLang with KvrsStorage there", "sglang", (Role.PREFILL, Role.DECODE)),
}


def _rows(
    config: Config, up: list[Row], agents: list[Row], recoveries: list[Row]
) -> Iterator[Finding]:
    """Yield findings on the rows of servers that should share rows: what is missing; if nothing is,
    which agents serve how many rows, and what the last restore has loaded.
    """
    if (found := _SHARING.get(config.cluster.backend)) is None:
        return
    what, page, roles = found
    regions = [each for row in agents for each in row.get("regions", ()) if each["is_alive"]]
    having, is_kept = {each["engine"] for each in regions}, config.backup.mode is not BackupMode.OFF
    lacking = [row["id"] for row in up if row["role"] in roles and row["id"] not in having]
    # By server a set of namespaces, because each of its ranks may have another one.
    meanings = {
        frozenset(each["namespace"] for each in regions if each["engine"] == engine)
        for engine in having
    }
    last = next((row for row in reversed(recoveries) if row["loaded_tokens"] is not None), None)
    if having and not is_kept:
        value = f"backup.mode is off, and agents serve rows of {', '.join(sorted(having))}"
        yield doubtful("rows", value, "local", "set backup.mode")
    elif is_kept and lacking:
        value = f"no agent serves any of {', '.join(lacking)}"
        remedy = f"start {what}, and see its log (kvrs docs {page})"
        yield doubtful("rows", value, f"those of each {' and '.join(roles)} instance", remedy)
    if len(meanings) > 1:
        remedy = (
            "compare the `fields` of two servers in the lines `serving an engine's rows` of the "
            "logs of their nodes' agents"
        )
        yield doubtful("rows", "they mean different things", "one namespace", remedy)
    if damaged := {row["id"]: row["refused_rows"] for row in agents if row.get("refused_rows")}:
        value = ", ".join(f"{count:,} at {name}" for name, count in damaged.items())
        remedy = "test the memory of these nodes: rows changed behind their engines' backs"
        yield doubtful("refused rows", value, "none", remedy)
    if is_kept and (alone := _without_copies(config, having)):
        value = f"no agent copies those of {', '.join(alone)}, which a loss of the node takes along"
        remedy = "give the agents of two nodes or more a row_port, and restart them"
        yield doubtful("rows", value, f"copies, as backup.mode {config.backup.mode} says", remedy)
    if last is not None and last["option"] == Option.RECOMPUTE and last["source"] is not None:
        value = f"the last restore {_loaded(last)}"
        remedy = f"see `kvrs incidents`, and the logs of {last['to']} and of the agents"
        yield doubtful("restores", value, "half of it or more", remedy)
    elif is_kept and having and not lacking and len(meanings) == 1:
        count = sum(each["rows"] for each in regions)
        at = ", ".join(sorted(row["id"] for row in agents if row.get("regions")))
        said = "no restore yet" if last is None else f"the last restore {_loaded(last)}"
        yield good("rows", f"{len(regions)} regions with {count:,} rows at {at}; {said}")


def _without_copies(config: Config, having: Set[str]) -> list[str]:
    """Return the servers with rows of which no other node's agent keeps a second copy, although
    `backup.mode` asks for one.
    """
    if config.backup.mode not in (BackupMode.REMOTE, BackupMode.BOTH):
        return []
    nodes = {str(each.id): node.id for node, each in config.cluster.instances()}
    found = (name for name in having if name in nodes)
    return sorted(name for name in found if config.cluster.row_holder(nodes[name]) is None)


def _loaded(row: Row) -> str:
    """Describe what a restore has loaded, when, and where."""
    loaded, at = row["loaded_tokens"], datetime.fromtimestamp(row["at_s"], UTC)
    history = loaded + row["computed_tokens"]
    return (
        f"loaded {loaded:,} of {history:,} tokens ({row['from']} to {row['to']}, "
        f"{at:%Y-%m-%d %H:%M:%S} UTC)"
    )


_TOKENIZER = "tokenizer.json"
# Factor within which two numbers of parameters count as the same, because names of models round
# them.
_SAME = 1.25


def exactness_findings(answer: ProxyAnswer) -> Iterator[Finding]:
    """Yield the findings that matter most: instances that compute different things, and a proxy
    without a tokenizer, at which streams continue inexactly.
    """
    if answer.state is not None:
        yield from _differences(answer.state["instances"])
        lacking = [row for row in answer.state["proxies"] if row.get("lacks_tokenizer")]
        if lacking:
            model, directory = lacking[0].get("model"), lacking[0].get("model_directory")
            yield bad("exactness", *_inexact(model, directory))


def _differences(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield what self-tests found on running instances: weights that differ, and near-ties."""
    tests = {
        row["id"]: row["self_test"] for row in rows if row["health"] == "up" and row["self_test"]
    }
    for check, key, is_fault in (
        ("weights", "differs_from", True),
        ("near-ties", "near_ties_with", False),
    ):
        pairs = sorted(
            (name, other)
            for name, test in tests.items()
            for other in test[key]
            if other in tests and name < other
        )
        if not pairs:
            continue
        shown = ", ".join(f"{one} and {other}" for one, other in pairs)
        if is_fault:
            yield _of_weights(shown, {name for pair in pairs for name in pair}, rows)
        else:
            value = f"two tokens that are about as likely change places at {shown}"
            allowed = "the same tokens everywhere: else responses say X-Kvrs-Exact: no"
            remedy = "the same GPU, TP, attention backend and version at all of them"
            yield doubtful(check, value, allowed, remedy)


def _of_weights(shown: str, names: set[str], rows: list[Mapping[str, Any]]) -> Finding:
    """Return the finding about instances that compute different tokens (`shown`): by other weights,
    by another version of the engine with equal weights, or by an unknown cause.
    """
    concerned = [row for row in rows if row["id"] in names]
    digests = {row["self_test"].get("weights_digest") for row in concerned}
    versions = sorted({str(row.get("engine_version")) for row in concerned})
    if len(digests) == 1 and digests != {""} and len(versions) > 1:
        value = f"different tokens at {shown}, of equal weights: versions {', '.join(versions)}"
        remedy = "none while the version is changed: streams end where they began"
        return doubtful("engine versions", value, "one version", remedy)
    other = [row["id"] for row in concerned if row["self_test"].get("weights") == "other"]
    cause = "other weights" if len(digests) > 1 else "other weights, or a fault"
    value = f"different tokens at {shown}: {cause}"
    if other:
        value += f"; new streams avoid {', '.join(other)}"
    remedy = (
        f"the same model and revision at all; or, if those of {other[0] if other else 'one'} are "
        f"the new ones: kvrs accept {other[0] if other else 'INSTANCE'}"
    )
    return bad("weights", value, "the same tokens everywhere", remedy)


def _inexact(model: str | None, directory: str | None) -> tuple[str, str, str]:
    """Return value, allowed value and remedy of the finding that the tokenizer is missing."""
    cause = f"no {_TOKENIZER} in {directory}"
    remedy = "save the model's tokenizer there (save_pretrained), and restart the proxy"
    if directory is None:
        cause = "the proxy does not know the model"
        remedy = "cluster.model, or --model, and a restart of the proxy"
        if model is not None:
            cause = f"no files of the model {model} on the proxy's machine"
            remedy = f"{how_to_get(model)} there, or cluster.model; then restart the proxy"
    value = (
        f"responses say X-Kvrs-Exact: no, and text behind a cut is the engine's own, since there "
        f"is {cause}"
    )
    return value, f"the model's {_TOKENIZER}", remedy


def model_findings(config: Config, state: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what the proxy lacks about the model of stock engines, which report little of it."""
    row = state["proxies"][0]
    model, directory = row.get("model"), row.get("model_directory")
    if not config.cluster.backend.is_stock or model is None:
        return
    if directory is None:
        value = f"none of {model} here: the size of its KV is assumed (that of an 8B model)"
        allowed = "its config.json: without it costs of moving KV are a guess"
        remedy = f"{how_to_get(model)}, or cluster.model; then restart the proxy"
        yield doubtful("files of the model", value, allowed, remedy)
    # Only a model that the engine has reported: other checks judge a configured model.
    elif config.cluster.model is None:
        remark = foreign_profile(config.profiles.prefill, Path(directory))
        if remark is not None:
            yield doubtful("configuration", remark.removeprefix("warning: "), "", "")


def foreign_profile(name: str | None, directory: Path | None) -> str | None:
    """Return the warning that a profile was measured with another model, by comparing the profile
    with the model's config.json; None: no difference found.
    """
    if name is None or directory is None:
        return None
    try:
        fields = read_config(directory / "config.json")
        own = geometry_of(directory / "config.json", fields, 16)
        profile = catalog.profile(name)
    except ConfigError:  # No warning: another check reports this fault.
        return None
    size = size_of(fields)
    compared = {
        "layers": (profile.geometry.layers, own.layers),
        "KV heads": (profile.geometry.kv_heads, own.kv_heads),
        "numbers a head": (profile.geometry.head_dim, own.head_dim),
        "billion parameters": (_parameters(profile), size and size.parameters / 1e9),
    }
    differing = [
        f"{theirs:.3g} {what}, and not {ours:.3g}"
        for what, (theirs, ours) in compared.items()
        if theirs and ours and not 1 / _SAME <= theirs / ours <= _SAME
    ]
    if not differing:
        return None
    return (
        f"warning: profiles.prefill: {name} is of {profile.model}, which has "
        f"{'; '.join(differing)}: its times are those of another model; allowed: a profile of this "
        f"one (`kvrs profile --url` measures one), or null, by which kvrs learns its own"
    )


def _parameters(profile: Profile) -> float | None:
    """Return the number of the profile's parameters in billions; None: the profile does not tell
    it.
    """
    if profile.load is None or profile.dtype not in ("bf16", "fp16"):
        return None
    return profile.load.weight_bytes / 2e9
