"""Checks of `kvrs doctor` on this machine: packages, limits, memory, clocks, files, ports, GPUs."""

import ctypes
import importlib
import platform
import resource
import runpy
import shutil
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import kvrs
from kvrs.cli.cluster_checks import ProxyAnswer
from kvrs.cli.common import faults_in
from kvrs.cli.extras import of_engine
from kvrs.cli.feasibility import faults_of, faults_of_draft, private_files, remarks_on, tls_sections
from kvrs.cli.findings import Finding, bad, doubtful, good, of_draft, of_fault
from kvrs.cli.ports_here import is_here, is_to_start, port_findings
from kvrs.config.cluster import Backend
from kvrs.config.exposure import needs_secret
from kvrs.config.file import ENV_NAME, Config
from kvrs.config.tls import TlsSettings
from kvrs.errors import EXTRAS, MissingExtraError, check_extras
from kvrs.process.memory import free_bytes
from kvrs.protocol.secrets import MIN_SECRET_BYTES

EXPIRES_SOON_S = 14 * 86400.0

_NVML_TIMEOUT_S = 5.0
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SLOW_CLOCKS = ("acpi_pm", "hpet", "jiffies", "pit", "refined-jiffies")
_TIMEX_BYTES = 256  # More than any kernel writes.
_CLOCK_UNSYNCHRONIZED = 5  # TIME_ERROR of adjtimex(2).


def machine_findings(
    config: Config, environ: Mapping[str, str], answer: ProxyAnswer
) -> Iterator[Finding]:
    yield good("Python", f"{platform.python_version()}, kvrs {kvrs.__version__}")
    yield from _extras(config)
    yield from _torch(config)
    yield _descriptors(config)
    yield from _memory(config, answer)
    yield from _clocks()
    yield from _configuration(config, environ)
    yield from port_findings(config, answer)
    yield _nvml()


# Packages.


def _extras(config: Config) -> Iterator[Finding]:
    missing: dict[str, str] = {}
    for extra in EXTRAS:
        try:
            check_extras(extra)
        except MissingExtraError as error:
            missing[extra] = str(error)
    installed = ", ".join(extra for extra in EXTRAS if extra not in missing)
    yield good("extras", installed or "none: proxy and agent need none")
    if "engine" in missing and _computes_here(config):
        value, _, remedy = missing["engine"].partition("; to install: ")
        yield doubtful("extra engine", value, "all of them where engines of kvrs run", remedy)


def _computes_here(config: Config) -> bool:
    return config.cluster.backend is Backend.EMBEDDED and any(
        is_here(instance.host) for _, instance in config.cluster.instances()
    )


def _torch(config: Config) -> Iterator[Finding]:
    """By the file that its build has written: to import it takes seconds."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    try:
        build = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    except OSError:
        remedy = "pip install --force-reinstall torch"
        yield bad("torch", "installed in part: no version.py", "a whole package", remedy)
        return
    cuda, wanted = build.get("cuda"), config.cluster.engine.device
    value = f"{build['__version__']} ({f'CUDA {cuda}' if cuda else 'no CUDA'})"
    if wanted != "cpu" and not cuda and _computes_here(config):
        remedy = "pip install torch from the CUDA index, or device: cpu"
        yield bad("torch", value, f"CUDA, for cluster.engine.device: {wanted}", remedy)
    else:
        yield good("torch", value)


# Limits and memory.


def _descriptors(config: Config) -> Finding:
    """Descriptors of a proxy: as it starts, it raises its soft limit to the hard one."""
    from kvrs.process.descriptors import raise_descriptor_limit
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
    """For the proxy's buffers and the agents' pages; those that run have theirs already."""
    agents = sum(is_to_start(node.agent.host, node.agent.port) for node in config.cluster.nodes)
    pages = agents * config.backup.capacity_bytes if config.agents_run else 0
    wanted, free = pages, free_bytes()
    if answer.state is None:
        proxy = config.proxy
        wanted += proxy.body_budget_bytes + proxy.unfinished_body_bytes + proxy.mirror_bytes
    value = f"{free:,} bytes can be given"
    if free >= wanted:
        yield good("memory", value)
    else:
        remedy = "lower backup.capacity_bytes, proxy.body_budget_bytes or proxy.mirror_bytes"
        yield doubtful("memory", value, f"{wanted:,}, of these {pages:,} for agents", remedy)
    folder = config.backup.directory
    if not pages or not Path(folder).is_dir():  # The latter is a fault of the configuration.
        return
    room = shutil.disk_usage(folder).free
    value = f"{room:,} bytes are free in {folder}"
    if room >= pages:
        yield good("shared memory", value)
    else:
        allowed = f"{pages:,} (backup.capacity_bytes of {agents} agents)"
        remedy = "mount a larger one (docker --shm-size, an emptyDir of medium Memory)"
        yield bad("shared memory", value, allowed, remedy)


# Clocks.


def _clocks() -> Iterator[Finding]:
    source = _read(_CLOCK_SOURCE)
    resolution_s = time.get_clock_info("monotonic").resolution
    value = f"{source or 'source not known'}, resolution {resolution_s:g} s"
    if source in _SLOW_CLOCKS:
        remedy = "clocksource=tsc, or the one of the hypervisor"
        yield doubtful("monotonic clock", value, "a source that is read without a call", remedy)
    else:
        yield good("monotonic clock", value)
    synchronized = _is_synchronized()
    if synchronized is None:
        yield good("wall clock", "the kernel does not tell whether it is synchronized")
    elif synchronized:
        yield good("wall clock", "synchronized")
    else:
        remedy = "run chrony or systemd-timesyncd: logs of several machines are laid side by side"
        yield doubtful("wall clock", "not synchronized", "synchronized", remedy)


def _is_synchronized() -> bool | None:
    """By adjtimex(2), which only reads with all modes 0; None: it is not allowed here."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _CLOCK_UNSYNCHRONIZED)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# The configuration and its files.


def _configuration(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """All that `kvrs config check` finds, with the files for themselves."""
    of_files: set[str] = set()
    for check, path, read in private_files(config, environ):
        if path is None:
            continue
        faults = faults_in(read)
        of_files.update(faults)
        yield from (of_fault(each, _remedy_of_file(each, path), check) for each in faults)
        if not faults:
            yield good(check, f"{path}, mode {Path(path).stat().st_mode & 0o777:04o}")
    yield from _secret(config, environ)
    for section, tls, load in tls_sections(config):
        faults = faults_in(load)
        of_files.update(faults)
        yield from (of_fault(each, _remedy_of_file(each, tls.key), section) for each in faults)
        if not faults:
            yield from _expiries(section, tls)
    yield from _draft(config)
    of_files.update(faults_of_draft(config))
    rest = [fault for fault in faults_of(config, environ) if fault not in of_files]
    for fault in rest:
        yield of_fault(fault, "change it in the file")
    remarks = remarks_on(config)
    for remark in remarks:
        kind, _, text = remark.partition(": ")
        yield doubtful("configuration", f"{kind}: {text}", "", "")
    if not rest and not remarks:
        yield good("configuration", "valid")


def _secret(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    if config.security.secret_file is not None or ENV_NAME in environ:
        return
    if not needs_secret(config):
        yield good("secret", "none is needed: no peer, agent or connector shares it")
    else:
        allowed = f"security.secret_file, or {ENV_NAME}, of {MIN_SECRET_BYTES} bytes or more"
        remedy = f"export {ENV_NAME}=$(openssl rand -hex 32); `kvrs up` makes its own"
        yield doubtful("secret", "none", allowed, remedy)


def _draft(config: Config) -> Iterator[Finding]:
    """The draft model: whether it loads, and whether that is sooner than the model does."""
    if config.speculation.draft is None or config.cluster.model is None:
        return
    if faults := [*faults_of_draft(config)]:
        yield from map(of_draft, faults)
        return
    with suppress(MissingExtraError):
        yield from of_engine().draft_findings(config)


def _remedy_of_file(fault: str, path: str) -> str:
    if "mode bits" in fault:
        return f"chmod {fault.rpartition('allowed: 0')[2]} {path}"
    return "renew it" if "expired" in fault else "put a file there that can be used"


def _expiries(section: str, tls: TlsSettings) -> Iterator[Finding]:
    """Yield the expiry of each certificate file that can be used now."""
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


# GPUs.


def _nvml() -> Finding:
    """In a thread that is left alone: a call blocks for long when a GPU dies."""
    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(_gpus()), daemon=True)
    thread.start()
    thread.join(_NVML_TIMEOUT_S)
    if found:
        return found[0]
    value = f"no answer within {_NVML_TIMEOUT_S:g} s"
    return bad("NVML", value, "an answer", "see dmesg for XIDs; reset the GPU or reboot")


def _gpus() -> Finding:
    from kvrs.agent.gpu import GpuSensor, NoGpusError

    try:
        sensor = GpuSensor(importlib.import_module("pynvml"))
    except ImportError:
        return good("NVML", "nvidia-ml-py is not installed (optional)")
    except NoGpusError as error:
        return good("NVML", f"{str(error).removeprefix('NVML: ')} (optional)")
    try:
        return good("NVML", f"{len(sensor.read())} GPUs")
    finally:
        sensor.close()
