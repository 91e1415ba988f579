"""The YAML file: one frozen object, checked whole before anything starts.

Each section has a module of its own in this package; this one composes them, checks what spans
sections, and turns every mistake into one line with path, value and allowed range.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, assert_never

import msgspec
from pydantic import Field, ValidationError

from kvrs.config import models as several
from kvrs.config.addresses import addresses_of, faults_of_addresses, faults_of_gossip
from kvrs.config.backup import AgentSettings, BackupMode, BackupSettings, StatePlaneSettings
from kvrs.config.cluster import Backend, ClusterSettings, InstanceSettings
from kvrs.config.divided import faults_of_workers
from kvrs.config.engine import ElasticSettings
from kvrs.config.gossip import GossipSettings
from kvrs.config.groups import faults_of_groups
from kvrs.config.logs import LogSettings
from kvrs.config.other_engines import faults_of_distserve, faults_of_vllm
from kvrs.config.overrides import override
from kvrs.config.peers import faults_of_peers
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.config.presets import SystemPreset
from kvrs.config.profiles import ProfileSettings
from kvrs.config.proxy import ProxySettings
from kvrs.config.settings import Settings, dump_yaml, faults_of, is_loopback, netloc, read_private
from kvrs.config.source import Source, lay_over, read_source
from kvrs.config.speculation import SpeculationSettings, faults_of_speculation
from kvrs.config.tls import PeerTlsSettings
from kvrs.config.transfer import TransferSettings
from kvrs.errors import ConfigError
from kvrs.profiles.catalog import decode_table, load_s, prefill_table
from kvrs.protocol.instance import Role
from kvrs.protocol.secrets import MIN_SECRET_BYTES

ENV_NAME = "KVRS_SECRET"
ADMIN_ENV_NAME = "KVRS_ADMIN_TOKEN"


class SecuritySettings(Settings):
    secret_file: str | None = None
    """Mode 0600, a secret on each line: the first is used, all are accepted. null: the
    environment's KVRS_SECRET.
    """
    admin_token_file: str | None = None
    """Mode 0600, a token on each line, for the admin port. null: KVRS_ADMIN_TOKEN; without any the
    port asks for none.
    """
    hosts: list[str] = Field(default=[], max_length=256)
    """Names of this cluster's machines, beside localhost and addresses: the Host of requests to
    ports that are not for clients.
    """
    key_file: str | None = None
    """Mode 0600, a line for each tenant, with hashes of its API keys and its limits
    (docs/guide/security.md). null: KVRS_KEYS; where that is not set either, clients need no key.
    """
    tls: PeerTlsSettings | None = None
    """TLS for HTTP between processes of the cluster; both ends have a certificate of `client_ca`.
    null: plain.
    """


class Config(Settings):
    proxy: ProxySettings = ProxySettings()
    """The process that clients talk to."""
    cluster: ClusterSettings = ClusterSettings()
    """Nodes with their instances and agents, and the engine."""
    policy: PolicySettings = PolicySettings()
    """Admission, hand-off and recovery (docs/guide/policies.md)."""
    slo: SloSettings = SloSettings()
    """Latency that clients expect, for the order of recoveries and for giving up."""
    transfer: TransferSettings = TransferSettings()
    """How KV pages move between nodes."""
    backup: BackupSettings = BackupSettings()
    """Checkpoints of KV in the host memory of the nodes' agents."""
    state_plane: StatePlaneSettings = StatePlaneSettings()
    """Memory of weights and KV that outlives the processes of instances."""
    elastic: ElasticSettings = ElasticSettings()
    """Reaction of an instance of several ranks to the loss of some."""
    speculation: SpeculationSettings = SpeculationSettings()
    """Tokens that are proposed to the embedded engine and verified several a step."""
    gossip: GossipSettings = GossipSettings()
    """Membership and facts, among agents and proxies (docs/guide/gossip.md); seconds are of a
    node's own time, without the time it was stopped.
    """
    profiles: ProfileSettings = ProfileSettings()
    """Measured tables that predictions rest on."""
    security: SecuritySettings = SecuritySettings()
    """Secrets, keys and certificates; files only, no secret stands here
    (docs/guide/security.md).
    """
    logs: LogSettings = LogSettings()
    """Logs of proxies and agents to stderr, and of the processes of `kvrs up` to their files
    (docs/guide/monitoring.md#logs).
    """
    models: list[several.ModelSettings] = Field(default=[], max_length=several.MOST_MODELS)
    """Several models at one port for clients (docs/guide/models.md). Sections of an entry lie over
    those of the file, key by key. Empty: one model, that of `cluster`.
    """

    def url_of(self, process: InstanceSettings | AgentSettings) -> str:
        """URL at which an instance or agent speaks kvrs's own protocol."""
        if isinstance(process, AgentSettings):
            return self.inner_url(process.host, process.port)
        return self.inner_url(process.host, process.protocol_port)

    def inner_url(self, host: str, port: int) -> str:
        scheme = "http" if self.security.tls is None else "https"
        return f"{scheme}://{netloc(host, port)}"

    @property
    def agents_run(self) -> bool:
        """Each node has an agent: it holds checkpoints, owns memory of instances, and is the node's
        gossip member.
        """
        keeps = self.backup.at_agents or self.state_plane.enabled
        return keeps or self.gossip.enabled


def parse_config(document: Any) -> Config:
    """Check a parsed YAML document.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        config = Config.model_validate({} if document is None else document)
    except ValidationError as error:
        raise ConfigError(faults_of(error, Config)) from None
    if config.models:
        configs_of(config)
    elif faults := list(_faults_across_sections(config)):
        raise ConfigError(faults)
    return config


def configs_of(config: Config) -> dict[str, Config]:
    """The whole configuration of each of `models`, by name. Raises ConfigError."""
    faults = list(several.faults_of_entries(config, config.models)) if config.models else []
    found: dict[str, Config] = {}
    wrong: list[list[str]] = []
    for index, model in enumerate(config.models if not faults else ()):
        wrong.append([])
        try:
            found[model.name] = parse_config(several.document_for(config, config.models, index))
        except ConfigError as error:
            wrong[-1] = error.faults
    faults += several.faults_of_all(config.models, wrong)
    if faults or (faults := list(several.faults_between(found))):
        raise ConfigError(faults)
    return found


def load_config(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    preset: SystemPreset | None = None,
    *,
    model: str | None = None,
    member: str | None = None,
) -> Config:
    """Read and check a YAML file; without one, the defaults. What it does not set is the preset's.

    With an environment, its variables replace `${NAME}` and override settings
    (docs/guide/configuration.md). Files that kvrs has written are read without. Of a file with
    `models`, the configuration is that of one `model`, or of the one with the `member`, a node or
    an instance.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds faults; or none of several
            models is meant.
    """
    config = checked(source := load_source(path, environ, preset))
    if not config.models and model is None:
        return config
    try:
        found = configs_of(config)
        return several.of_member(found, member) if member else several.of_model(found, model)
    except ConfigError as error:
        raise ConfigError(f"{source.name}: {error}") from None


def load_source(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    preset: SystemPreset | None = None,
    backend: Backend | None = None,
) -> Source:
    """The same before it is checked, with the place of each value. `backend`: in place of the
    file's; a preset's drafts are for the embedded one.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or variables name no setting.
    """
    source = Source("defaults") if path is None else read_source(path, environ)
    if preset is not None:
        below = read_source(preset.path)
        if (backend or source.value(("cluster", "backend"))) not in (None, Backend.EMBEDDED):
            below.document.pop("speculation", None)
        lay_over(source, below)
    if environ is not None:
        override(source, environ, Config, Config().model_dump(mode="json"))
    return source


def checked(source: Source) -> Config:
    """Check a document whose values have places.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        return parse_config(source.document)
    except ConfigError as error:
        raise ConfigError([source.located(fault) for fault in error.faults]) from None


def dump_config(config: Config) -> str:
    """YAML that `parse_config` reads back as an equal object."""
    return dump_yaml(document_of(config))


def document_of(config: Config) -> dict[str, Any]:
    """The document that `parse_config` reads back; with `models`, what an entry leaves to the file
    is left out.
    """
    return config.model_dump(mode="json", exclude_unset=bool(config.models))


def config_digest(config: Config) -> str:
    """16 hex digits that are the same for equal configurations, whatever their files look like."""
    return hashlib.sha256(msgspec.json.encode(config.model_dump(mode="json"))).hexdigest()[:16]


def read_secret(security: SecuritySettings, environ: Mapping[str, str]) -> bytes:
    """The first of the cluster's shared secrets, the one in use; raises as `read_secrets` does."""
    return read_secrets(security, environ)[0]


def read_secrets(security: SecuritySettings, environ: Mapping[str, str]) -> list[bytes]:
    """The cluster's shared secrets, from `security.secret_file` or the environment's KVRS_SECRET:
    one on each line.

    The first is used; the others are accepted too, so that a secret can be rotated.

    Raises:
        ConfigError: there is none, one is too short, or the file is readable for other users.
    """
    return _read_lines("a secret", "secret_file", security.secret_file, ENV_NAME, environ)


def read_admin_tokens(security: SecuritySettings, environ: Mapping[str, str]) -> list[bytes]:
    """The tokens of which the admin port asks for one, from `security.admin_token_file` or the
    environment's KVRS_ADMIN_TOKEN, one on each line; empty: it asks for none.

    Raises:
        ConfigError: one is too short, or the file is readable for other users.
    """
    if security.admin_token_file is None and ADMIN_ENV_NAME not in environ:
        return []
    return _read_lines(
        "a token", "admin_token_file", security.admin_token_file, ADMIN_ENV_NAME, environ
    )


def _read_lines(
    what: str, key: str, path: str | None, variable: str, environ: Mapping[str, str]
) -> list[bytes]:
    if path is None:
        source = f"environment variable {variable}"
        if not (text := environ.get(variable, "").encode()):
            state = "is empty" if variable in environ else "is not set"
            raise ConfigError(
                f"{source} {state}; allowed: {what} of at least {MIN_SECRET_BYTES} bytes, such as "
                f"`openssl rand -hex 32` prints, or its file in security.{key}"
            )
    else:
        source = f"security.{key}: {path}"
        text = read_private(path, source)
    secrets = [line.strip() for line in text.strip().split(b"\n")]
    for secret in secrets:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{source}: {what} of {len(secret)} bytes; allowed: at least {MIN_SECRET_BYTES}"
            )
    return secrets


def _faults_across_sections(config: Config) -> Iterator[str]:
    yield from _faults_of_names(config)
    budget, body = config.proxy.body_budget_bytes, config.proxy.max_body_bytes
    if budget < 2 * body:  # One client gets three quarters of it.
        yield (
            f"proxy.body_budget_bytes: got {budget}; allowed: at least twice "
            f"proxy.max_body_bytes ({body})"
        )
    match config.cluster.backend:
        case Backend.VLLM:
            yield from faults_of_vllm(config.cluster, config.backup.mode, config.profiles)
        case Backend.DISTSERVE:
            yield from faults_of_distserve(config.cluster)
        case Backend.EMBEDDED:
            pass
        case _:
            assert_never(config.cluster.backend)
    yield from _faults_of_connectors(config)
    yield from _faults_of_ranks(config)
    yield from faults_of_groups(config.cluster, re_forms=config.elastic.enabled)
    yield from _faults_of_roles(config)
    yield from _faults_of_services(config)
    yield from _faults_of_profiles(config)
    if config.state_plane.enabled:
        yield from _faults_of_state_plane(config)
    if config.backup.mode is BackupMode.PEER:
        yield from faults_of_peers(config.cluster, state_plane=config.state_plane.enabled)
    cluster, proxy = config.cluster, config.proxy
    yield from faults_of_speculation(config.speculation, cluster)
    if config.gossip.enabled:
        yield from faults_of_gossip(cluster, proxy)
    yield from faults_of_addresses(addresses_of(cluster, proxy, with_gossip=config.gossip.enabled))
    if config.proxy.workers > 1:
        yield from faults_of_workers(proxy, config.policy, agents_run=config.agents_run)


def _repeated(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, count) for name, count in Counter(names).items() if count > 1]


def _faults_of_names(config: Config) -> Iterator[str]:
    nodes = config.cluster.nodes
    used = {host.node for _, one in config.cluster.instances() for host in one.stage_hosts}
    for node in nodes:
        if not node.instances and node.id not in used:
            yield (
                f"cluster.nodes: node {node.id!r} has no instances; allowed: at least one, or a "
                f"stage of another node's (stage_hosts)"
            )
    holders = [instance.id for _, instance in config.cluster.instances()]
    holders += [node.agent_id for node in nodes]
    for _, instance in config.cluster.instances():
        holders += [instance.stage_host_id(stage) for stage in instance.remote_stages]
    for what, names in (("node", [node.id for node in nodes]), ("instance", holders)):
        for name, count in _repeated(names):
            yield f"cluster.nodes: {what} id {name!r} is used {count} times; allowed: once"
    proxies = [*config.proxy.names, *(peer.id for peer in config.proxy.every_peer())]
    for name, count in _repeated(proxies):
        yield f"proxy.peers: id {name!r} is used {count} times; allowed: once, proxy.id included"
    here, numbered = config.proxy.peer_host, config.proxy.numbered_peers
    others = [] if numbered is None else numbered.others(config.proxy.id)
    if numbered is not None:
        yield from numbered.faults(config.proxy)
    for peer in [*config.proxy.peers, *others] if is_loopback(here) else ():
        if not is_loopback(peer.host):
            yield (
                f"proxy.peer_host: got {here!r}, with proxy {peer.id!r} at {peer.host!r}; allowed: "
                f"an address at which that proxy reaches this one"
            )


def _faults_of_ranks(config: Config) -> Iterator[str]:
    """Only ranks of the embedded engine are ours, and only on processors."""
    cluster = config.cluster
    for _, instance in cluster.instances():
        several = f"cluster.nodes: instance {instance.id!r} has {instance.ranks} ranks"
        if instance.ranks > 1 and cluster.backend is not Backend.EMBEDDED:
            yield f"{several}; allowed with backend {cluster.backend.value!r}: 1"
        elif instance.ranks > 1 and cluster.engine.device != "cpu":
            yield f"{several}; allowed with cluster.engine.device: {cluster.engine.device}: 1"
        if instance.ranks > 1 and config.elastic.min_ranks > instance.ranks:
            yield f"{several}; allowed with elastic.min_ranks: {config.elastic.min_ranks}: as many"
        if instance.pace is not None and cluster.backend is not Backend.EMBEDDED:
            yield (
                f"cluster.nodes: instance {instance.id!r} has pace: {instance.pace}; allowed with "
                f"backend {cluster.backend.value!r}: null"
            )
        if instance.stage_hosts:
            yield from _faults_of_stage_hosts(config, instance)


def _faults_of_stage_hosts(config: Config, instance: InstanceSettings) -> Iterator[str]:
    nodes = {node.id for node in config.cluster.nodes}
    for stage, host in instance.remote_stages.items():
        if host.node not in nodes:
            yield (
                f"cluster.nodes: instance {instance.id!r} has stage {stage} on node "
                f"{host.node!r}; allowed: {', '.join(sorted(nodes))}"
            )
    if config.elastic.min_ranks > 1:
        yield (
            f"elastic.min_ranks: got {config.elastic.min_ranks}; allowed with instance "
            f"{instance.id!r}, of which each stage in a host re-forms for itself: 1"
        )


def _faults_of_roles(config: Config) -> Iterator[str]:
    instances = [instance for _, instance in config.cluster.instances()]
    roles = config.cluster.roles
    # These compute prompts themselves, and restore KV from agents.
    is_decode_only = (
        roles == {Role.DECODE}
        and not config.cluster.services
        and all(each.connector_port for each in instances)
    )
    for role in (Role.DECODE,) if is_decode_only else (Role.PREFILL, Role.DECODE):
        if not roles & {role, Role.BOTH}:
            yield f"cluster.nodes: no instance of role {role.value!r}; allowed: at least one"
    mode = config.backup.mode
    if mode in (BackupMode.REMOTE, BackupMode.BOTH) and len(config.cluster.nodes) < 2:
        yield (
            f"backup.mode: got {mode.value!r} with 1 node; allowed: 'off' or 'local', or a "
            f"second node"
        )


def _faults_of_services(config: Config) -> Iterator[str]:
    """Other engines know their ids, and have keys of their own."""
    backend, services = config.cluster.backend, config.cluster.services
    if services and backend is not Backend.VLLM:
        yield (
            f"cluster.services: got {len(services)} with backend {backend.value!r}; allowed: none, "
            f"or backend 'vllm'"
        )
    if services and config.agents_run:
        what = "gossip.enabled: true" if config.gossip.enabled else "backup.mode"
        yield (
            f"cluster.services: got {len(services)} with {what}, and their nodes have no agents; "
            f"allowed: none, or gossip.enabled: false and backup.mode: off"
        )
    for name, count in _repeated(service.id for service in services):
        yield f"cluster.services: id {name!r} is used {count} times; allowed: once"
    for service in services:
        if service.role is Role.BOTH:
            yield (
                f"cluster.services: service {service.id!r} has role 'both'; allowed: prefill, "
                f"decode"
            )


def _faults_of_profiles(config: Config) -> Iterator[str]:
    needed: tuple[tuple[str, str | None, tuple[Callable[[str], object], ...]], ...] = (
        ("profiles.prefill", config.profiles.prefill, (prefill_table,)),
        ("cluster.engine.pace", config.cluster.engine.pace, (decode_table, load_s)),
        ("speculation.pace", config.speculation.pace, (decode_table, load_s)),
        *(
            (f"cluster.nodes: instance {each.id!r}: pace", each.pace, (decode_table, load_s))
            for _, each in config.cluster.instances()
        ),
    )
    for key, wanted, tables in needed:
        if wanted is None:
            continue
        try:
            for table in tables:
                table(wanted)
        except ConfigError as error:
            yield from (f"{key}: {fault}" for fault in error.faults)


def _faults_of_state_plane(config: Config) -> Iterator[str]:
    backend, device = config.cluster.backend, config.cluster.engine.device
    if backend is not Backend.EMBEDDED or device != "cpu":
        yield (
            f"state_plane.enabled: got true with backend {backend.value!r} on {device!r}; allowed: "
            f"'embedded' on 'cpu'"
        )


def _faults_of_connectors(config: Config) -> Iterator[str]:
    backend = config.cluster.backend
    for _, instance in config.cluster.instances():
        if instance.connector_port is not None and backend is not Backend.VLLM:
            yield (
                f"cluster.nodes: instance {instance.id!r} has a connector_port; allowed with "
                f"backend {backend.value!r}: null"
            )
