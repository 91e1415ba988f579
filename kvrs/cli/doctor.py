"""`kvrs doctor` checks this machine and the cluster; it starts and changes nothing.

Machine checks of `kvrs doctor`: descriptors, memory, private files, certificates and
the configuration.
"""

import json
import logging
import os
import platform
import resource
import shutil
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

import kvrs
from kvrs.cli.common import faults_in
from kvrs.cli.feasibility import faults_of, private_files, remarks_on, tls_sections
from kvrs.cli.findings import (
    Finding,
    Level,
    ProxyAnswer,
    ask,
    bad,
    cluster_findings,
    doubtful,
    exactness_findings,
    good,
    has_failed,
    model_findings,
    of_fault,
)
from kvrs.config.exposure import has_peers_or_agents, needs_secret
from kvrs.config.file import ENV_NAME, Config, load_config
from kvrs.config.origin import CommandLine
from kvrs.config.security import TlsSettings
from kvrs.process.memory import free_bytes
from kvrs.protocol.secrets import MIN_SECRET_BYTES

EXPIRES_SOON_S = 14 * 86400.0


def machine_findings(
    config: Config, environ: Mapping[str, str], answer: ProxyAnswer, *, is_default: bool = False
) -> Iterator[Finding]:
    """Check this machine. `is_default`: no file and no proxy gives the configuration, so that its
    engine is not known.
    """
    yield good("Python", f"{platform.python_version()}, kvrs {kvrs.__version__}")
    yield _descriptors(config)
    yield from _memory(config, answer)
    yield from _configuration(config, environ, is_default=is_default)


def _can_bind(host: str, port: int = 0) -> bool:
    """Return whether a process could listen here: the host has an address of this machine, and the
    port is free.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                # Needed as for a server, since closed connections may still occupy the port.
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
    except OSError:
        return False
    return True


# Checks of the limit on descriptors and of memory.


def _descriptors(config: Config) -> Finding:
    """Check how many connections a proxy's descriptors allow, after raising the soft limit as a
    proxy does at its start.
    """
    from kvrs.process.memory import raise_descriptor_limit
    from kvrs.proxy.wire.capacity import capacity_of

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    try:
        streams = capacity_of(config).settings.max_streams
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    soft, hard = ("unlimited" if each < 0 else f"{each:,}" for each in before)
    value = f"soft {soft}, hard {hard}, enough for {streams:,} streams"
    if streams == config.proxy.max_streams:
        return good("descriptors", value)
    allowed = f"enough for proxy.max_streams: {config.proxy.max_streams:,}"
    remedy = "raise the hard limit (LimitNOFILE, ulimit -Hn), or lower proxy.max_streams"
    return doubtful("descriptors", value, allowed, remedy)


def _memory(config: Config, answer: ProxyAnswer) -> Iterator[Finding]:
    """Check that there is memory for the proxy's buffers and the agents' pages; processes that run
    already have theirs.
    """
    agents = sum(_can_bind(node.agent.host, node.agent.port) for node in config.cluster.nodes)
    pages = agents * config.backup.capacity_bytes if config.agents_run else 0
    wanted, free = pages, free_bytes()
    if answer.state is None:
        proxy = config.proxy
        wanted += proxy.body_budget_bytes + proxy.mirror_bytes
    value = f"{free:,} bytes can be given"
    if free >= wanted:
        yield good("memory", value)
    else:
        remedy = "lower backup.capacity_bytes, proxy.body_budget_bytes or proxy.mirror_bytes"
        yield doubtful("memory", value, f"{wanted:,}, of these {pages:,} for agents", remedy)
    folder = config.backup.directory
    # Not checked here: a missing directory is reported as a fault of the configuration.
    if not pages or not Path(folder).is_dir():
        return
    room = shutil.disk_usage(folder).free
    value = f"{room:,} bytes are free in {folder}"
    if room >= pages:
        yield good("shared memory", value)
    else:
        allowed = f"{pages:,} (backup.capacity_bytes of {agents} agents)"
        remedy = "mount a larger one (docker --shm-size, an emptyDir of medium Memory)"
        yield bad("shared memory", value, allowed, remedy)


# Checks of the configuration and of the files that it names.


def _configuration(
    config: Config, environ: Mapping[str, str], *, is_default: bool
) -> Iterator[Finding]:
    """Yield all that `kvrs config check` finds, and a line for each private file."""
    of_files: set[str] = set()
    for check, path, read in private_files(config, environ):
        if path is None:
            continue
        faults = faults_in(read)
        of_files.update(faults)
        yield from (of_fault(each, _remedy_of_file(each, path), check) for each in faults)
        if not faults:
            yield good(check, f"{path}, mode {Path(path).stat().st_mode & 0o777:04o}")
    yield from _secret(config, environ, is_default=is_default)
    for section, tls, load in tls_sections(config):
        faults = faults_in(load)
        of_files.update(faults)
        yield from (of_fault(each, _remedy_of_file(each, tls.key), section) for each in faults)
        if not faults:
            yield from _expiries(section, tls)
    rest = [fault for fault in faults_of(config, environ) if fault not in of_files]
    for fault in rest:
        yield of_fault(fault, "change it in the file")
    remarks = remarks_on(config)
    for remark in remarks:
        kind, _, text = remark.partition(": ")
        yield doubtful("configuration", f"{kind}: {text}", "", "")
    if not rest and not remarks:
        yield good("configuration", "valid")


def _secret(config: Config, environ: Mapping[str, str], *, is_default: bool) -> Iterator[Finding]:
    if config.security.secret_file is not None or ENV_NAME in environ:
        return
    if is_default and not has_peers_or_agents(config):
        yield good("secret", "none; only peers, agents and kvrs engines need one")
    elif not needs_secret(config):
        yield good("secret", "none is needed: no peer or agent shares it")
    else:
        allowed = f"security.secret_file, or {ENV_NAME}, of {MIN_SECRET_BYTES} bytes or more"
        remedy = f"export {ENV_NAME}=$(openssl rand -hex 32); `kvrs lab up` makes its own"
        yield doubtful("secret", "none", allowed, remedy)


def _remedy_of_file(fault: str, path: str) -> str:
    if "mode bits" in fault:
        return f"chmod {fault.rpartition('allowed: 0')[2]} {path}"
    return "renew it" if "expired" in fault else "put a file there that can be used"


def _expiries(section: str, tls: TlsSettings) -> Iterator[Finding]:
    """Yield when each valid certificate of a section expires."""
    from kvrs.net.tls import hand_shake, pinned_context

    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tls.cert, tls.key)
    ends = {"cert": hand_shake(pinned_context(tls.cert), server)}
    if tls.client_ca is not None:
        authorities = pinned_context(tls.client_ca).get_ca_certs()
        found = (str(each["notAfter"]) for each in authorities)
        ends["client_ca"] = min(found, key=ssl.cert_time_to_seconds)
    for name, until in ends.items():
        left_s = ssl.cert_time_to_seconds(until) - time.time()
        value, check = f"valid until {until}", f"{section}.{name}"
        if left_s > EXPIRES_SOON_S:
            yield good(check, value)
        elif left_s > 0:
            allowed = f"{EXPIRES_SOON_S / 86400:.0f} days or more"
            yield doubtful(check, value, allowed, "renew it: files are loaded when they change")
        else:
            yield bad(check, value, "one that has not expired", "renew it")


FAILED = 1  # Exit status if a check has found a fault.

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}


def run_doctor(config: Path | None, admin_url: str | None, *, as_json: bool) -> int:
    """Run all checks and print their findings; return the exit status."""
    # Log lines of the modules that are checked would only repeat the findings.
    for package in ("kvrs", "kvrs_engine"):
        logging.getLogger(package).addHandler(logging.NullHandler())
    settings = load_config(config, os.environ)
    answer = ask(settings, os.environ, url=admin_url)
    if config is None and (line := _command_line(answer)) is not None:
        settings = line.read(os.environ)
    first = list(exactness_findings(answer))
    is_default = config is None and answer.state is None
    machine = list(machine_findings(settings, os.environ, answer, is_default=is_default))
    cluster = list(cluster_findings(settings, answer))
    if answer.state is not None:
        cluster += model_findings(settings, answer.state)
    everything = [*first, *machine, *cluster]
    if as_json:
        parts = {"exactness": first, "machine": machine, "cluster": cluster}
        shown = {part: [asdict(each) for each in found] for part, found in parts.items()}
        print(json.dumps(shown, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for title, found in (("", first), ("This machine", machine), ("The cluster", cluster)):
            if title:
                console.print(title, style="bold")
            for each in found:
                console.print(_line(each))
        console.print(_verdict(everything, is_checked=answer.state is not None))
    return FAILED if has_failed(everything) else 0


def _command_line(answer: "ProxyAnswer") -> CommandLine | None:
    """Return the command line of the proxy that has answered; None: the proxy has a file, or none
    has answered.
    """
    row = None if answer.state is None else answer.state["proxies"][0].get("command_line")
    return None if row is None else msgspec.convert(row, CommandLine)


def _line(finding: Finding) -> Text:
    line = Text.assemble(
        (f"  {finding.level.value:<8}", _COLOURS[finding.level]),
        f"{finding.check}: {finding.value}",
    )
    if finding.allowed:
        line.append(f"; allowed: {finding.allowed}")
    if finding.remedy:
        line.append(f"; to do: {finding.remedy}")
    return line


def _verdict(findings: Iterable[Finding], *, is_checked: bool) -> str:
    """Return the last line. `is_checked`: a proxy answered, so that the cluster was checked."""
    levels = [each.level for each in findings]
    failures, warnings = levels.count(Level.FAILURE), levels.count(Level.WARNING)
    counts = (
        f"{len(levels)} checks: {failures} failure{'' if failures == 1 else 's'}, "
        f"{warnings} warning{'' if warnings == 1 else 's'}"
    )
    if is_checked:
        return counts
    return f"{counts}; the cluster was not checked: --admin-url URL of a running proxy checks it"
