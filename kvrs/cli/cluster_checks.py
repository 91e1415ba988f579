"""Checks of `kvrs doctor` on the cluster, from the state of a proxy."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import kvrs
from kvrs.cli.findings import Finding, bad, doubtful, good
from kvrs.config.backup import BackupMode
from kvrs.config.cluster import Backend
from kvrs.config.file import ADMIN_ENV_NAME, Config, config_digest
from kvrs.core.fleet.generated import Continues
from kvrs.errors import ConfigError

PATIENCE_S = 5.0  # For instances that have not come up yet, and peers that are not reached.
_ASK_AGAIN_S = 0.5
_KEYS = ("instances", "agents", "proxies", "members", "policy")


@dataclass(frozen=True, slots=True)
class ProxyAnswer:
    """The answer of a proxy's admin port: its state, or why there is none."""

    url: str
    state: Mapping[str, Any] | None = None
    cause: str = ""
    # Something listens there that gave no state (taken), or asked for another token (locked).
    is_taken: bool = False
    is_locked: bool = False


def ask(
    config: Config,
    environ: Mapping[str, str],
    patience_s: float = PATIENCE_S,
    url: str | None = None,
) -> ProxyAnswer:
    """The state of the proxy at the configured admin port, or at `url`, asked again for so long
    while an instance has not come up yet, or a peer of the proxy is not reached.
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
    yield from _proxies(config, state["proxies"], answer.url)
    yield from _instances(state["instances"])
    yield from _models(state["instances"])
    yield from _connectors(config, state["instances"])
    yield from _hand_offs(state["instances"])
    yield from _self_tests(state["instances"])
    if config.agents_run or state["agents"]:
        yield from _agents(config, state["agents"])
    if config.gossip.enabled or state["members"]:
        yield from _members(state["members"])


def _no_state(answer: ProxyAnswer) -> Finding:
    value = f"no state from {answer.url} ({answer.cause}), so the cluster is not checked"
    if answer.is_taken:
        remedy = "end what listens there, or give the file of the proxy that runs as --config"
        if answer.is_locked:
            remedy = f"give its admin token ({ADMIN_ENV_NAME}), or its file as --config"
        return bad("proxy", value, "the admin port of a kvrs proxy", remedy)
    return doubtful("proxy", value, "a proxy that runs", "kvrs proxy --config FILE, or kvrs up")


def _proxies(config: Config, rows: list[Mapping[str, Any]], url: str) -> Iterator[Finding]:
    names = ", ".join(f"{row['id']} (pid {row['pid']})" for row in rows)
    yield good("proxy", f"{names} at {url}")
    versions = sorted({str(row["version"]) for row in rows})
    if versions == [kvrs.__version__]:
        yield good("version", f"kvrs {kvrs.__version__}, as here")
    else:
        value = f"the proxy is kvrs {', '.join(versions)}, here is {kvrs.__version__}"
        yield doubtful("version", value, "the same version everywhere", "restart what is older")
    if config.proxy.workers == 1:  # Workers have configurations of their own, made from the file.
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


def _digest(config: Config, row: Mapping[str, Any]) -> Finding:
    """By the proxy's own file, or the one that the `kvrs up` was given that started it."""
    running, here = str(row["config_digest"]), config_digest(config)
    if here in (running, row.get("source_digest")):
        return good("configuration in use", f"{here}, as here")
    return doubtful(
        "configuration in use",
        f"{running}, here {here}",
        "the same configuration",
        "give the file of the proxy, or of its `kvrs up`, as --config; if it has changed, reload "
        "or restart the proxy, or send USR1 to its `kvrs up`",
    )


def _instances(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    up = [row for row in rows if row["health"] == "up"]
    if len(up) == len(rows):
        yield good("instances", f"{len(up)} of {len(rows)} up")
    for row in rows:
        check = f"instance {row['id']}"
        if row["health"] == "starting" and row.get("reason") is None:
            yield doubtful(check, "starting", "up", "wait, then run this again")
        elif row["health"] != "up":  # Also one that was asked for and has not answered yet.
            yield bad(check, _health(row), "up", _remedy_of_health(row))
        elif row["drain"] is not None:
            remedy = f"DELETE /kvrs/v1/drain/{row['id']} when it is to be used again"
            yield doubtful(check, "draining by order", "in use", remedy)
        elif row["state"] in ("degraded", "reforming"):
            value = f"{row['state']}, {row['degree']} of {row['full_degree']} ranks"
            yield doubtful(check, value, "all ranks", "see its log for what ended a rank")


def _health(row: Mapping[str, Any]) -> str:
    reason = row.get("reason")
    return f"{row['health']} ({reason})" if reason else str(row["health"])


def _remedy_of_health(row: Mapping[str, Any]) -> str:
    if any(f"HTTP {status}" in (row.get("reason") or "") for status in (401, 403)):
        return "give the proxy a key that it takes (KVRS_VLLM_API_KEY), and restart the proxy"
    if row["health"] == "refused":
        return f"make what listens at {row['url']} what the configuration names"
    return f"start it at {row['url']}, or see its log"


def _models(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """A proxy refuses an instance of another model, fingerprint or geometry: those up agree."""
    up = [row["id"] for row in rows if row["health"] == "up"]
    if len(up) > 1:
        yield good("model and fingerprint", f"equal at {len(up)} instances that are up")


def _connectors(config: Config, rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """The kvrs connectors in vLLM, as the proxy reaches them, and whether `backup.mode` fits."""
    up = [row for row in rows if row["health"] == "up"]
    for row in up:
        if (connector := row["connector"]) is not None:
            yield _connector(f"connector of {row['id']}", connector)
    if config.cluster.backend is not Backend.VLLM:
        return
    mode = config.backup.mode.value
    having = {each.id for _, each in config.cluster.instances() if each.connector_port}
    lacking = [row["id"] for row in up if row["id"] not in having]
    if having and mode == BackupMode.OFF:
        value = f"{mode}, and {len(having)} instances have a connector_port"
        remedy = "set backup.mode, and start an agent on each node"
        yield doubtful("backup.mode", value, "remote, local or both", remedy)
    elif having and lacking:
        value = f"{mode}, and no connector_port at {', '.join(lacking)}"
        remedy = "start vLLM with the connector there (kvrs docs vllm)"
        yield doubtful("backup.mode", value, "a connector in each, or no checkpoint", remedy)


def _connector(check: str, report: Mapping[str, Any]) -> Finding:
    if (reason := report["off_reason"]) is not None:
        remedy = (
            "KVRS_SECRET and the cluster's file have to be equal at vLLM and proxy, the "
            "connector_port open to the proxy; else see vLLM's log, and restart it"
        )
        return bad(check, f"off ({reason})", "at work: it saves and restores", remedy)
    if others := report["differs_from"]:
        value = f"{report['fingerprint']}, not that of {', '.join(others)}"
        remedy = "the same weights, dtype, block size and overrides at all of them"
        return doubtful(check, value, "one fingerprint: else nothing is restored", remedy)
    value = f"kvrs {report['version']}, {report['pages_saved']:,} pages saved, "
    value += f"{report['pages_loaded']:,} loaded, {report['pages_damaged']:,} damaged"
    if report["version"] != kvrs.__version__:
        remedy = "install the same kvrs beside vLLM, and restart it"
        return doubtful(check, value, f"kvrs {kvrs.__version__}, as here", remedy)
    return good(check, value)


def _hand_offs(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """Pairs of vLLM servers between which NIXL refuses hand-offs."""
    for row in rows:
        report = row.get("hand_offs")
        if report is None or row["role"] == "prefill" or not report["differs_from"]:
            continue
        value = f"{report['format']}, none from {', '.join(report['differs_from'])}"
        remedy = "one version, model, --kv-cache-dtype and attention backend at both"
        yield bad(f"hand-offs of {row['id']}", value, "the format of its prefill", remedy)


def _self_tests(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """Results of the self-tests: whether KV really moves, and whether streams are continued
    exactly.
    """
    up = [row for row in rows if row["health"] == "up"]
    if up and all(row["self_test"] is None for row in up):
        remedy = "proxy.self_test: true, and restart the proxy"
        yield doubtful("self-test", "off", "on: otherwise nothing is seen", remedy)
        return
    for row in up:
        if (test := row["self_test"]) is not None:
            yield _self_test(f"self-test of {row['id']}", test)


def _self_test(check: str, test: Mapping[str, Any]) -> Finding:
    cause = f" ({test['cause']})" if test["cause"] else ""
    value = f"{_moves(test['moves_kv'])}, {_continues(test['continues'])}"
    value += _drafted(test["drafts"]) + cause
    if not test["done"]:
        return doubtful(check, f"not done{cause}", "done", "wait, then run this again")
    if test["continues"] == Continues.NONE:
        remedy = "streams that it loses end; see its version in `kvrs docs backends`"
        return bad(check, value, "it continues streams", remedy)
    if test["moves_kv"] is False:
        remedy = "check its connector and its page port: what is not fetched is computed again"
        return bad(check, value, "KV moves", remedy)
    if test["restores"] is False:
        remedy = "see the log of vLLM and its connector: what is not restored is computed again"
        return bad(check, value, "pages of agents are restored", remedy)
    if test["failures"]:
        return doubtful(check, f"failed{cause}", "a test that ends", "see the log of the instance")
    if test["differs_from"]:  # `exactness_findings` says what that means.
        value += f", other tokens than {', '.join(test['differs_from'])}"
        return doubtful(check, value, "the same tokens everywhere", "see the first line")
    if test["continues"] in (Continues.TEXT, Continues.GREEDY):
        remedy = "engines of one version, on equal GPUs, with deterministic kernels (backends.md)"
        if test["drafts"] is not None:
            remedy += "; see whether it is exact without drafts"
        return doubtful(check, value, "exact, also sampled", remedy)
    if test["drafts"] is not None and not test["drafts"]["proposed"]:
        remedy = "what it continues was seen without drafts: see that its source proposes any"
        return doubtful(check, value, "a test with drafts", remedy)
    return good(check, value)


def _drafted(drafts: Mapping[str, int] | None) -> str:
    if drafts is None:
        return ""
    return f", {drafts['accepted']} of {drafts['proposed']} drafts accepted"


def _moves(moves: bool | None) -> str:
    if moves is None:
        return "KV not tested"
    return "KV moves" if moves else "KV does not move"


def _continues(continues: str | None) -> str:
    return "continuing not tested" if continues is None else f"continues: {continues}"


def _agents(config: Config, rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    up = [row for row in rows if row["health"] == "up"]
    if not rows:
        value = f"none at the proxy, {len(config.cluster.nodes)} in the configuration"
        yield bad("agents", value, "one per node", "restart the proxy with this configuration")
    elif len(up) == len(rows):
        held = sum(row["held_bytes"] or 0 for row in rows)
        yield good("agents", f"{len(up)} of {len(rows)} up, which hold {held:,} bytes")
    for row in rows:
        if row["health"] != "up":
            remedy = f"kvrs agent --config FILE --node {row['node']}, or see its log"
            yield bad(f"agent {row['id']}", _health(row), "up", remedy)


def _members(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    others = [row for row in rows if row["status"] != "alive"]
    if not rows:
        remedy = "gossip.enabled: true in the proxy's configuration, and restart it"
        yield bad("gossip", "the proxy is no member", "a member", remedy)
    elif not others:
        yield good("gossip", f"{len(rows)} members alive")
    for row in others:
        remedy = "start it, or open its gossip port (UDP and TCP) to the others"
        yield doubtful(f"gossip member {row['id']}", str(row["status"]), "alive", remedy)
