"""The YAML file: one frozen object, checked whole before anything starts.

Every section is defined beside the code that reads it; this module composes them, checks what spans sections,
and turns every fault into one line that names path, value and what is allowed.
"""

import ipaddress
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from kvrs.agent.config import AgentSettings, BackupMode, BackupSettings
from kvrs.cluster.config import Backend, DistServeSettings
from kvrs.engine.config import EngineSettings
from kvrs.errors import ConfigError
from kvrs.gossip.config import GossipSettings
from kvrs.ids import InstanceId, NodeId
from kvrs.policy.config import PolicySettings, SloSettings
from kvrs.profiles.catalog import decode_table, prefill_table
from kvrs.protocol.instance import Role
from kvrs.protocol.secrets import MIN_SECRET_BYTES
from kvrs.proxy.config import ProxySettings
from kvrs.settings import Settings, parse_yaml
from kvrs.transfer.config import TransferSettings

ENV_NAME = "KVRS_SECRET"


class InstanceSettings(Settings):
    id: InstanceId = Field(min_length=1, max_length=64)
    role: Role = Field(strict=False)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)  # HTTP. 0: any free port, chosen once by `kvrs up`.
    page_port: int = Field(default=0, ge=0, le=65535)  # Where its pages are pulled from.

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class NodeSettings(Settings):
    id: NodeId = Field(min_length=1, max_length=64)
    instances: list[InstanceSettings] = Field(min_length=1)
    agent: AgentSettings = AgentSettings()  # Runs where `Config.agents_run`.

    @property
    def agent_id(self) -> InstanceId:
        """Under this name the node's agent is a peer of the instances, and a holder of checkpoints."""
        return InstanceId(f"agent-{self.id}")


def demo_nodes(count: int) -> list[NodeSettings]:
    """`count` nodes with one prefill and one decode instance each: n0 with p0 and d0, n1 with p1 and d1, ..."""
    return [
        NodeSettings(
            id=NodeId(f"n{index}"),
            instances=[
                InstanceSettings(id=InstanceId(f"p{index}"), role=Role.PREFILL),
                InstanceSettings(id=InstanceId(f"d{index}"), role=Role.DECODE),
            ],
        )
        for index in range(count)
    ]


class ClusterSettings(Settings):
    backend: Backend = Field(default=Backend.EMBEDDED, strict=False)
    distserve: DistServeSettings = DistServeSettings()
    model: str | None = None  # A Hugging Face directory; none: a tiny random model, generated from `engine.seed`.
    engine: EngineSettings = EngineSettings()
    allow_faults: bool = False  # Instances obey POST /kvrs/v1/faults: slow or cut links, damaged pages. For experiments only.
    drain_s: float = Field(default=30.0, ge=0, le=3600)  # An instance told to end waits so long for its streams to be elsewhere.
    nodes: list[NodeSettings] = Field(default_factory=lambda: demo_nodes(2), min_length=1)

    def instances(self) -> Iterator[tuple[NodeSettings, InstanceSettings]]:
        return ((node, instance) for node in self.nodes for instance in node.instances)


class ProfileSettings(Settings):
    prefill: str | None = None  # A table that comes with kvrs, by name, or one's own, by path; none: what each instance measured.


class SecuritySettings(Settings):
    secret_file: str | None = None  # Mode 0600, a secret on each line. Without it the environment's KVRS_SECRET is used.


class Config(Settings):
    proxy: ProxySettings = ProxySettings()
    cluster: ClusterSettings = ClusterSettings()
    policy: PolicySettings = PolicySettings()
    slo: SloSettings = SloSettings()
    transfer: TransferSettings = TransferSettings()
    backup: BackupSettings = BackupSettings()
    gossip: GossipSettings = GossipSettings()
    profiles: ProfileSettings = ProfileSettings()
    security: SecuritySettings = SecuritySettings()

    @property
    def agents_run(self) -> bool:
        """An agent holds checkpoints, and it is its node's member in gossip: either is reason enough to have one."""
        return self.backup.mode is not BackupMode.OFF or self.gossip.enabled


def parse_config(document: Any) -> Config:
    """Check a parsed YAML document.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        config = Config.model_validate({} if document is None else document)
    except ValidationError as error:
        raise ConfigError([_line(fault) for fault in error.errors(include_url=False)]) from None
    if faults := list(_faults_across_sections(config)):
        raise ConfigError(faults)
    return config


def load_config(path: Path) -> Config:
    """Read and check a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds faults.
    """
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from None
    try:
        return parse_config(document)
    except ConfigError as error:
        raise ConfigError([f"{path}: {fault}" for fault in error.faults]) from None


def dump_config(config: Config) -> str:
    """YAML that `parse_config` reads back as an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def read_secret(security: SecuritySettings, environ: Mapping[str, str]) -> bytes:
    """The first of the cluster's shared secrets, the one in use; raises as `read_secrets` does."""
    return read_secrets(security, environ)[0]


def read_secrets(security: SecuritySettings, environ: Mapping[str, str]) -> list[bytes]:
    """The cluster's shared secrets, from `security.secret_file` or the environment's KVRS_SECRET: one on each line.

    The first is in use; the others are those before it or after it, which gossip accepts as well while they are exchanged.

    Raises:
        ConfigError: there is none, one is too short, or others may read the file.
    """
    if security.secret_file is None:
        text, source = environ.get(ENV_NAME, "").encode(), f"environment variable {ENV_NAME}"
    else:
        source = f"security.secret_file: {security.secret_file}"
        try:
            with Path(security.secret_file).open("rb") as file:
                if mode := os.fstat(file.fileno()).st_mode & 0o077:
                    raise ConfigError([f"{source}: others may use it (mode bits {mode:03o}); allowed: 0600"])
                text = file.read()
        except OSError as error:
            raise ConfigError([f"{source}: {error.strerror}"]) from None
    secrets = [line.strip() for line in text.strip().split(b"\n")]
    for secret in secrets:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError([f"{source}: a secret of {len(secret)} bytes; allowed: at least {MIN_SECRET_BYTES}"])
    return secrets


def _line(fault: Any) -> str:
    path = ".".join(str(part) for part in fault["loc"]) or "the file"
    if fault["type"] == "extra_forbidden":
        return f"{path}: unknown key; allowed: {', '.join(_allowed_keys(fault['loc']))}"
    if fault["type"] == "missing":
        return f"{path}: missing"
    # Only scalars are echoed: a whole section would bury the message.
    value = fault["input"]
    shown = "a section" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
    message = "allowed: a section" if fault["type"] in ("model_type", "model_attributes_type") else fault["msg"]
    return f"{path}: got {shown}; {message[0].lower()}{message[1:]}"


def _allowed_keys(path: tuple[str | int, ...]) -> list[str]:
    """The keys of the section in which the last part of `path` is unknown."""
    schema = Config.model_json_schema()
    node: dict[str, Any] = schema
    for part in path[:-1]:
        node = node["items"] if isinstance(part, int) else node["properties"][part]
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return sorted(node["properties"])


def _faults_across_sections(config: Config) -> Iterator[str]:
    instances = [instance for _, instance in config.cluster.instances()]
    nodes = config.cluster.nodes
    names_of_instances = [i.id for i in instances] + [node.agent_id for node in nodes]
    for what, names in (("node", [node.id for node in nodes]), ("instance", names_of_instances)):
        for name, count in Counter(map(str, names)).items():
            if count > 1:
                yield f"cluster.nodes: {what} id {name!r} is used {count} times; allowed: once"
    if config.backup.mode in (BackupMode.REMOTE, BackupMode.BOTH) and len(nodes) < 2:
        yield f"backup.mode: got {config.backup.mode.value!r} with 1 node; allowed: 'off' or 'local', or a second node"
    for name, count in Counter([config.proxy.id, *(peer.id for peer in config.proxy.peers)]).items():
        if count > 1:
            yield f"proxy.peers: id {name!r} is used {count} times; allowed: once, proxy.id included"
    if config.cluster.backend is Backend.VLLM:
        yield from _faults_of_vllm(config)
    roles = {instance.role for instance in instances}
    for role in (Role.PREFILL, Role.DECODE):
        if not roles & {role, Role.BOTH}:
            yield f"cluster.nodes: no instance of role {role.value!r}; allowed: at least one"
    if config.cluster.backend is Backend.DISTSERVE:
        yield from _faults_of_distserve(config)
    for key, wanted, table in (
        ("profiles.prefill", config.profiles.prefill, prefill_table),
        ("cluster.engine.pace", config.cluster.engine.pace, decode_table),
    ):
        try:
            if wanted is not None:
                table(wanted)
        except ConfigError as error:
            yield from (f"{key}: {fault}" for fault in error.faults)
    listeners: list[InstanceSettings | AgentSettings] = [*instances, *(node.agent for node in nodes)]
    ports = [f"{listener.host}:{port}" for listener in listeners for port in (listener.port, listener.page_port) if port]
    ports += [f"{config.proxy.host}:{port}" for port in (config.proxy.port, config.proxy.admin_port) if port]
    if config.gossip.enabled:
        ports += [f"{host}:{port}" for _, host, port in gossip_members(config) if port]
        yield from _faults_of_gossip(config)
    ports += [f"{config.proxy.host}:{config.proxy.peer_port}"] if config.proxy.peer_port else []
    for address, count in Counter(ports).items():
        if count > 1:
            yield f"port {address} is used {count} times; allowed: once"


def gossip_members(config: Config) -> Iterator[tuple[NodeId, str, int]]:
    """Everybody of the file: the agents, each under its node's name, and the proxy. With host and gossip port."""
    yield from ((node.id, node.agent.host, node.agent.gossip_port) for node in config.cluster.nodes)
    yield NodeId(config.proxy.id), config.proxy.host, config.proxy.gossip_port


def gossip_seeds(config: Config, me: NodeId) -> dict[NodeId, str]:
    """Where to find the others; whose port is not known finds us."""
    return {member: f"{host}:{port}" for member, host, port in gossip_members(config) if port and member != me}


def _faults_of_gossip(config: Config) -> Iterator[str]:
    if any(node.id == config.proxy.id for node in config.cluster.nodes):
        yield f"proxy.id: {config.proxy.id!r} is the id of a node too; allowed with gossip: a name of its own"
    for member, host, _ in gossip_members(config):
        try:
            everywhere = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            # Packets are sent from the event loop, which must not wait for names to be looked up.
            yield f"gossip: the host of {member!r} is {host!r}; allowed: a numeric address"
            continue
        if everywhere:
            # It is what the others are told, and to them it means themselves.
            yield f"gossip: the host of {member!r} is {host!r}; allowed: an address where others find it"


def _faults_of_vllm(config: Config) -> Iterator[str]:
    """What it cannot say itself must be said here."""
    if config.cluster.model is None:
        yield "cluster.model: missing with backend 'vllm'; allowed: the model's directory, for its tokenizer and config.json"
    if config.profiles.prefill is None:
        yield "profiles.prefill: missing with backend 'vllm', which publishes no table; allowed: a name, or the path of one"
    if config.backup.mode is not BackupMode.OFF:
        yield f"backup.mode: got {config.backup.mode.value!r} with backend 'vllm', which sends no checkpoints; allowed: 'off'"
    for _, instance in config.cluster.instances():
        if instance.role is Role.BOTH:
            yield f"cluster.nodes: instance {instance.id!r} has role 'both'; allowed with backend 'vllm': prefill, decode"
        if instance.port == 0:
            yield f"cluster.nodes: instance {instance.id!r} has no port; allowed with backend 'vllm': the port it listens on"


def _faults_of_distserve(config: Config) -> Iterator[str]:
    for node in config.cluster.nodes:
        roles = sorted(instance.role.value for instance in node.instances)
        if roles != [Role.DECODE, Role.PREFILL]:
            allowed = "allowed with backend 'distserve': one prefill and one decode, which are one server"
            yield f"cluster.nodes: node {node.id!r} has instances of roles {', '.join(roles)}; {allowed}"
    for key, wanted in (("cluster.engine.pace", config.cluster.engine.pace), ("profiles.prefill", config.profiles.prefill)):
        if wanted is not None:
            yield f"{key}: got {wanted!r}; allowed with backend 'distserve': null (each stage measures itself)"
