"""Faults of a valid configuration that cannot work: ports open to everyone, missing files, KV that
does not fit.

Remark on how many tokens and streams of the configured model an agent's checkpoint
store holds.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from kvrs.cli.common import faults_in
from kvrs.config.cluster import Backend
from kvrs.config.distserve import check_home
from kvrs.config.exposure import check_exposure, notes
from kvrs.config.file import ENV_NAME, Config, Source, read_admin_tokens, read_secrets
from kvrs.config.security import TlsSettings, read_tenants
from kvrs.errors import ConfigError
from kvrs.protocol.geometry import KvGeometry
from kvrs.proxy.backends.model_config import geometry_of, read_config
from kvrs.proxy.backends.model_files import find_model
from kvrs.tracing.settings import trace_settings

# Tokens that a typical stream reserves (its prompt and `max_tokens`), and the number of such
# streams below which a store counts as small.
_STREAM_TOKENS = 4096
_FEW_STREAMS = 8


def capacity_remark(config: Config) -> Iterator[str]:
    """Yield how much of the model's KV fits into an agent's store; nothing if no agent keeps KV, or
    the model has no files here.
    """
    if not config.agents_run or config.cluster.model is None:
        return
    if config.cluster.backend is Backend.VLLM:
        return  # No remark: agents of vLLM have no store, but share the rows in vLLM's own memory.
    if (directory := find_model(config.cluster.model)) is None:
        return
    path = directory / "config.json"
    try:
        geometry = geometry_of(path, read_config(path), config.cluster.engine.page_size_tokens)
    except ConfigError:  # No remark: another check reports this fault.
        return
    if config.cluster.backend is Backend.EMBEDDED:
        # The embedded engine keeps KV in 32 bits, whatever the model's files say.
        geometry = dataclasses.replace(geometry, dtype_bytes=4)
    size_bytes, token_bytes = config.backup.capacity_bytes, geometry.bytes_per_token
    tokens = size_bytes // token_bytes
    streams = tokens // _STREAM_TOKENS
    line = (
        f"backup.capacity_bytes: {size_bytes:,} hold {tokens:,} tokens of this model at an agent, "
        f"{streams:,} streams of {_STREAM_TOKENS:,}; a stream reserves its prompt and max_tokens, "
        "and one without room is unprotected"
    )
    if streams >= _FEW_STREAMS:
        yield f"note: {line}"
        return
    enough_bytes = _FEW_STREAMS * _STREAM_TOKENS * token_bytes
    yield f"warning: {line}; allowed: {enough_bytes:,} and more for {_FEW_STREAMS} such streams"


def faults_of(config: Config, environ: Mapping[str, str], *, elsewhere: bool = False) -> list[str]:
    """Return the faults that keep processes of this configuration from starting or serving, each
    once. `elsewhere`: the configuration is for another machine, so no file and no name of this one
    is looked up.
    """
    found = [*faults_in(partial(check_exposure, config, environ)), *_contradictions(config)]
    if not elsewhere:
        found += _faults_here(config, environ)
    return list(dict.fromkeys(found))


def faults_of_start(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return the faults that keep a proxy from starting here. Files of engines and agents are not
    looked up, since they may be on other machines.
    """
    found = faults_of(config, environ, elsewhere=True)
    return list(dict.fromkeys([*found, *_faults_of_proxy_here(config, environ)]))


def check_all(source: Source, faults: Sequence[str]) -> None:
    """Raises ConfigError: there are faults, which get their places in the file."""
    if faults:
        raise ConfigError([source.located(fault) for fault in faults])


def remarks_on(config: Config, *, elsewhere: bool = False) -> list[str]:
    """Return remarks on settings that are allowed but deserve a second look, each with the prefix
    `note: ` or `warning: `.
    """
    found = [*notes(config), *_doubts(config)]
    return found if elsewhere else [*found, *_here(config)]


def private_files(
    config: Config, environ: Mapping[str, str]
) -> Iterator[tuple[str, str | None, Callable[[], object]]]:
    """Yield key, path and reader of each file that only its owner may read; path None: the reader
    takes the contents from the environment.
    """
    security = config.security
    for key, path, read in (
        ("secret_file", security.secret_file, read_secrets),
        ("admin_token_file", security.admin_token_file, read_admin_tokens),
        ("key_file", security.key_file, read_tenants),
    ):
        yield f"security.{key}", path, partial(read, security, environ)


def tls_sections(config: Config) -> Iterator[tuple[str, TlsSettings, Callable[[], object]]]:
    """Yield each TLS section of the configuration under its key, with a function that loads its
    files.
    """
    from kvrs.net.tls import load_certificates

    for section, files in (
        ("proxy.tls", config.proxy.tls),
        ("proxy.admin_tls", config.proxy.admin_tls),
        ("security.tls", config.security.tls),
    ):
        if files is not None:
            yield section, files, partial(load_certificates, section, files)


def _faults_here(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults that keep a process from starting or serving on this machine."""
    yield from _faults_of_proxy_here(config, environ)
    yield from _faults_of_model(config)
    if config.agents_run:
        yield from _faults_of_backup(config)
    if config.cluster.backend is Backend.DISTSERVE:
        yield from faults_in(partial(check_home, config, environ))


def _faults_of_proxy_here(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    yield from faults_in(partial(trace_settings, environ))
    if config.proxy.workers > 1:
        from kvrs.proxy.process.workers import check_shared_ports

        yield from faults_in(partial(check_shared_ports, config))
    if services := config.cluster.services:
        from kvrs.proxy.fleet.discovery import check_pods

        yield from faults_in(partial(check_pods, services))
    for key, path, read in private_files(config, environ):
        # Not a fault if only the secret is missing, because `kvrs lab up` makes one.
        if path is not None or key != "security.secret_file" or ENV_NAME in environ:
            yield from faults_in(read)
    for _, _, load in tls_sections(config):
        yield from faults_in(load)
    if (log := config.proxy.event_log) is not None:
        folder = Path(log).parent
        if not os.access(folder, os.W_OK | os.X_OK):
            yield f"proxy.event_log: got {log!r}; allowed: a file in a directory that is writable"


def _contradictions(config: Config) -> Iterator[str]:
    """Yield settings that contradict each other, whatever the machine is."""
    cluster, engine = config.cluster, config.cluster.engine
    is_ours = "max_model_len" in engine.model_fields_set and not cluster.backend.is_stock
    if is_ours and (held := _tokens_held(config)) < engine.max_model_len:
        yield (
            f"cluster.engine.max_model_len: got {engine.max_model_len}; allowed: at most {held}, "
            f"the tokens of {engine.pages} pages"
        )
    if config.proxy.workers > 1:
        for index, peer in enumerate(config.proxy.peers):
            if "workers" not in peer.model_fields_set:
                yield (
                    f"proxy.peers.{index}.workers: missing, with proxy.workers: "
                    f"{config.proxy.workers} here; allowed: proxy.workers of {peer.id!r}, also if "
                    f"it is 1"
                )


def _doubts(config: Config) -> Iterator[str]:
    """Yield a note for each allowed setting that is probably unintended."""
    engine, cluster = config.cluster.engine, config.cluster
    if not cluster.backend.is_stock and (held := _tokens_held(config)) < engine.max_model_len:
        yield (
            f"note: cluster.engine: {engine.pages} pages of {engine.page_size_tokens} tokens hold "
            f"one request of at most {held} tokens; max_model_len is {engine.max_model_len}"
        )
    for node, instance in cluster.instances():
        if instance.host in ("0.0.0.0", "::") and len(cluster.nodes) > 1:  # noqa: S104 - compared
            yield (
                f"note: cluster.nodes: instance {instance.id!r} of node {node.id!r} is at "
                f"{instance.host!r}, which means another machine on each machine (host: as others "
                f"reach it; bind: where it listens)"
            )


def _here(config: Config) -> Iterator[str]:
    """Yield notes and warnings about the files of this machine."""
    yield from _without_tokenizer(config)
    yield from _foreign_profile(config)
    yield from capacity_remark(config)


def _without_tokenizer(config: Config) -> Iterator[str]:
    """Yield a warning for a stock engine without `tokenizer.json`, which the proxy needs to make
    the text of continued streams. (The embedded engine does not start without the file.)
    """
    cluster = config.cluster
    if cluster.model is None or cluster.backend is Backend.EMBEDDED:
        return
    from kvrs.proxy.backends.model_files import find_model

    found = find_model(cluster.model) or Path(cluster.model)
    if not (found / "tokenizer.json").is_file():
        yield (
            f"warning: cluster.model: {found} has no tokenizer.json: streams that are cut are not "
            f"continued exactly, and responses say X-Kvrs-Exact: no"
        )


def _foreign_profile(config: Config) -> Iterator[str]:
    from kvrs.cli.findings import foreign_profile
    from kvrs.proxy.backends.model_files import find_model

    model = config.cluster.model
    if model is not None and config.cluster.backend.is_stock:
        remark = foreign_profile(config.profiles.prefill, find_model(model))
        yield from () if remark is None else (remark,)


def _tokens_held(config: Config) -> int:
    return config.cluster.engine.pages * config.cluster.engine.page_size_tokens


def _faults_of_model(config: Config) -> Iterator[str]:
    """Yield faults of a model whose files are missing, or lack what the configuration needs."""
    cluster = config.cluster
    if cluster.model is None:
        return
    model = Path(cluster.model)
    if cluster.backend.is_stock:
        from kvrs.proxy.backends.model_files import fault_of_model, find_model

        if find_model(cluster.model) is None:
            yield fault_of_model(cluster.model)
        return
    if not (model / "config.json").is_file():
        yield f"cluster.model: {model} has no config.json; allowed: a Hugging Face directory"
        return
    if cluster.backend is Backend.EMBEDDED:
        yield from (f"cluster.model: {fault}" for fault in _missing_files(model))
        yield from _faults_of_memory(config)
        yield from faults_of_draft(config)


def faults_of_draft(config: Config) -> Iterator[str]:
    """Yield faults of a draft model whose files are missing, or whose vocabulary differs from the
    model's.
    """
    if config.speculation.draft is None or config.cluster.model is None:
        return
    draft, model = Path(config.speculation.draft), Path(config.cluster.model)
    if not (draft / "config.json").is_file():
        yield f"speculation.draft: {draft} has no config.json; allowed: a Hugging Face directory"
        return
    missing = [*_missing_files(draft)]
    yield from (f"speculation.draft: {fault}" for fault in missing)
    if missing or not (model / "tokenizer.json").is_file():
        return
    if (draft / "tokenizer.json").read_bytes() != (model / "tokenizer.json").read_bytes():
        yield (
            f"speculation.draft: {draft} has another tokenizer.json than {model}; allowed: a model "
            f"of the same tokenizer"
        )
    size, wanted = _vocab_size(draft), _vocab_size(model)
    if size != wanted is not None:
        yield (
            f"speculation.draft: {draft}/config.json: vocab_size is {size!r}; allowed: {wanted!r}, "
            f"as in {model}"
        )


def _vocab_size(model: Path) -> object:
    """Return the size of a model's vocabulary by its config.json; None: not stated there."""
    try:
        return json.loads((model / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _missing_files(model: Path) -> Iterator[str]:
    if not (model / "tokenizer.json").is_file():
        yield f"{model} has no tokenizer.json; allowed: the file beside config.json"
    index = model / "model.safetensors.index.json"
    if not index.is_file():
        if not (model / "model.safetensors").is_file():
            yield f"{model} has no weights; allowed: model.safetensors, or parts and their index"
        return
    try:
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        yield f"{index} is no index of weights"
        return
    if missing := sorted(part for part in parts if not (model / str(part)).is_file()):
        yield f"{model} lacks {len(missing)} of {len(parts)} files of weights, as {missing[0]}"


def _faults_of_memory(config: Config) -> Iterator[str]:
    """Yield faults of instances on this machine that need more host memory for KV than it has."""
    from kvrs.proxy.backends.model_config import read_geometry

    cluster, engine = config.cluster, config.cluster.engine
    assert cluster.model is not None
    geometry: list[KvGeometry] = []
    yield from faults_in(
        lambda: geometry.append(read_geometry(cluster.model or "", engine.page_size_tokens))
    )
    if not geometry or engine.device != "cpu":
        return
    # The embedded engine keeps KV in 32 bits, whatever the model's files say.
    page_bytes = replace(geometry[0], dtype_bytes=4).page_bytes
    hosts = [instance.host for _, instance in cluster.instances()]
    together = max(map(hosts.count, hosts))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if together * engine.pages * page_bytes > memory_bytes:
        yield (
            f"cluster.engine.pages: got {engine.pages}, of {page_bytes:,} bytes, for {together} "
            f"instances on one machine; allowed: at most "
            f"{memory_bytes // (page_bytes * together)}, which this machine's memory holds"
        )
    if config.agents_run and config.backup.capacity_bytes < page_bytes:
        yield (
            f"backup.capacity_bytes: got {config.backup.capacity_bytes}; allowed: at least a page "
            f"({page_bytes})"
        )


def _faults_of_backup(config: Config) -> Iterator[str]:
    folder = config.backup.directory
    if not os.access(folder, os.W_OK | os.X_OK):
        yield f"backup.directory: got {folder!r}; allowed: a directory that is writable"
        return
    hosts = [node.agent.host for node in config.cluster.nodes]
    together = max(map(hosts.count, hosts))
    size_bytes = shutil.disk_usage(folder).total
    if (wanted := together * config.backup.capacity_bytes) > size_bytes:
        yield (
            f"backup.capacity_bytes: got {config.backup.capacity_bytes}, {wanted} for {together} "
            f"agents on one machine; allowed: at most {size_bytes // together}, the "
            f"size of {folder}"
        )
