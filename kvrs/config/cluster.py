"""Section `cluster` of the configuration: nodes with their instances and agents, and the engine.

Sections `cluster.engine` and `elastic` of the configuration: the embedded engine, and its
instances of several ranks. Imports no torch, so that the proxy can read the file too.

Instances found by the addresses of host names: `cluster.services`. Pure.

Found addresses are added to `cluster.nodes` of the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvrs.config.backup import AgentSettings
from kvrs.config.settings import (
    DISTSERVE,
    EMBEDDED,
    EMBEDDED_OR_DISTSERVE,
    NAME,
    VLLM,
    Host,
    Settings,
    netloc,
)
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, NodeId, along_ring
from kvrs.protocol.instance import Role


class BatchSettings(Settings):
    """Settings that the scheduler reads."""

    page_size_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens per KV page; a power of two."""
    pages: int = Field(default=2048, ge=2, le=1 << 24)
    """KV pages of one instance."""
    max_batch_tokens: int = Field(default=256, ge=1, le=1 << 20)
    """Most tokens computed per step: decode first, then chunks of prefill."""
    max_running: int = Field(default=64, ge=1, le=1 << 16)
    """Most sequences that own pages at a time."""
    max_model_len: int = Field(default=2048, ge=2, le=1 << 24)
    """Most tokens of prompt and output together."""


class EngineSettings(BatchSettings):
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu or cuda."""
    pace: str | None = None
    """Name of a profile: the engine sleeps so that each step takes that profile's time. Tokens and
    KV are real; only the pace is another GPU's.
    """
    disk_bytes_per_s: float | None = Field(default=None, gt=0)
    """Rate at which weights are read, including those of a draft model, which come first; with
    `pace`, those of the profile's model. Ranks of one process that read at the same time share it.
    null: as fast as the disk allows, in simulations 2 GB/s.
    """
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the weights of the generated model."""

    @field_validator("page_size_tokens")
    @classmethod
    def _fills_vectors(cls, page_size_tokens: int) -> int:
        # Keys are computed in blocks of whole pages, which must fill whole SIMD vectors.
        if page_size_tokens & (page_size_tokens - 1):
            raise PydanticCustomError("page_size", "allowed: a power of two from 1 to 1024")
        return page_size_tokens


class ExpertSettings(Settings):
    """Section `elastic.experts`: models with mixtures of experts on several ranks."""

    layout: Literal["whole", "split"] = "whole"
    """whole: a rank has as few experts as possible, and complete ones if shares allow it. split:
    each rank has a part of every expert, so that all ranks have equal work whatever experts are
    chosen; for models whose experts are wide enough to be divided.
    """
    room_share: float = Field(default=0.1, ge=0, le=8)
    """Memory of a rank for copies of experts that are chosen often, relative to its own weights.
    Ranks share the rows of these experts if that makes the busiest ranks faster. Results do not
    depend on it. Not for instances with `stage_hosts`. 0: no copies.
    """


# The planner divides weights among the ranks that are left, or join.
Planner = Literal["on_demand", "cmm"]


class ElasticSettings(Settings):
    enabled: bool = True
    """An instance that loses one of several ranks continues with the others, in the same process
    and with the same streams, and grows back. false: a lost rank ends its instance.
    """
    spread_heads: bool = False
    """For KV heads that cannot be divided evenly, each rank computes them for its own share of the
    streams, so that with at least as many streams as ranks all ranks have equal work. Every rank
    then has the weights of these heads; without room for these, the setting has no effect. false:
    some of the ranks compute these heads for all streams.
    """
    planner: Planner = "on_demand"
    """How weights are divided again when ranks are lost, leave or join. on_demand: a rank keeps its
    weights, and lost ones are distributed to all (RaidServe). cmm: each rank gets an even share of
    consecutive units, copied from ranks that have it and otherwise read (AnchorTP's Continuous
    Minimal Migration). Both read the same bytes; cmm usually copies more.
    """
    min_ranks: int = Field(default=1, ge=1, le=4096)
    """Fewest ranks with which an instance serves; with fewer it starts the lost ones again, or
    ends. At most the ranks of the smallest instance that has several ranks.
    """
    least_gain: float = Field(default=0.1, ge=0, le=1)
    """Least gain for which a stage is lent: min(1, (1 - busy share of the donor's stage) / busy
    share of the lost one).
    """
    experts: ExpertSettings = ExpertSettings()
    """Mixtures of experts on several ranks."""


class Backend(StrEnum):
    """The engine that the instances of a cluster run."""

    EMBEDDED = "embedded"  # The engine of kvrs_engine/engine, which `kvrs lab up` starts.
    # DistServe with `distserve_patches`: one server is a node's prefill and its decode instance.
    DISTSERVE = "distserve"
    VLLM = "vllm"  # Unmodified vLLM; kvrs does not start it.
    SGLANG = "sglang"  # Unmodified SGLang; kvrs does not start it.

    @property
    def is_stock(self) -> bool:
        """True for an unmodified engine: it has no instance protocol, and cannot prove that it
        belongs to the cluster.
        """
        return self in (Backend.VLLM, Backend.SGLANG)


MAX_RANKS = 64  # Most ranks of one instance, over all its stages.
SERVED_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._:/-]*$"


class DistServeSettings(Settings):
    flags: list[str] = Field(default_factory=list)
    """Flags of DistServe's own command line; `--model` is `cluster.model`."""


class StageHostSettings(Settings):
    node: NodeId = Field(min_length=1, max_length=64)
    """Node on which the stage's ranks run."""
    host: Host = "127.0.0.1"
    """Address of the stage's port, as the instance reaches it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to which the instance sends batches and pages. 0: any free port, chosen once by `kvrs
    lab up`.
    """


def stage_host_id(instance: str, stage: int) -> InstanceId:
    """Return the id of the process that runs a stage of the configured instance."""
    return InstanceId(f"{instance}-stage-{stage}")


class InstanceSettings(Settings):
    id: InstanceId = Field(min_length=1, max_length=64, pattern=NAME)
    """Name of the instance, unique in the cluster: letters, digits and `._-`."""
    role: Role = Field(strict=False)
    """prefill, decode or both."""
    host: Host = "127.0.0.1"
    """Address of the instance's ports, as other processes reach it: an IP address, or a name, which
    is resolved for each new connection.
    """
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the HTTP API. 0: any free port, chosen once by `kvrs lab up`."""
    page_port: int = Field(default=0, ge=0, le=65535, json_schema_extra=EMBEDDED_OR_DISTSERVE)
    """Port from which other processes fetch its KV pages. 0: any free port, chosen once by `kvrs
    lab up`.
    """
    bind: Host | None = Field(default=None, json_schema_extra=EMBEDDED_OR_DISTSERVE)
    """Address its ports listen on, such as 0.0.0.0 or ::. null: `host`."""
    tp: int = Field(default=1, ge=1, le=MAX_RANKS, json_schema_extra=EMBEDDED)
    """Ranks that compute each layer together, each a part of its heads and tiles (tensor
    parallelism).
    """
    pp: int = Field(default=1, ge=1, le=MAX_RANKS, json_schema_extra=EMBEDDED)
    """Stages with equally many layers, each of `tp` ranks (pipeline parallelism)."""
    stage_hosts: list[StageHostSettings] = Field(
        default=[], max_length=MAX_RANKS, json_schema_extra=EMBEDDED
    )
    """Processes that run the ranks of the last stages, or of all stages, in their order. The stages
    before them run below the instance's own process. Such a process outlives the instance's
    process, and keeps the stage's weights for the next one. If it is lost, the instance waits for
    it, or borrows that of another instance of the `group` (elastic.enabled).
    """
    group: str | None = Field(
        default=None, min_length=1, max_length=64, pattern=NAME, json_schema_extra=EMBEDDED
    )
    """Instances of one group lend each other their stage hosts: the host of another instance also
    computes the stage of a lost host, until there is a new one. Each of them has `stage_hosts` for
    all stages, with equal divisions. null: no lending and no borrowing.
    """

    @model_validator(mode="after")
    def _has_ranks(self) -> "InstanceSettings":
        if len(self.stage_hosts) > self.pp:
            raise PydanticCustomError(
                "stage_hosts",
                f"{len(self.stage_hosts)} stage_hosts with {self.pp} stages; allowed: at most "
                f"{self.pp}",
            )
        if self.stage_hosts and self.ranks == 1:
            raise PydanticCustomError(
                "stage_hosts", "stage_hosts with 1 rank; allowed: none, it is one process"
            )
        if self.ranks > MAX_RANKS:
            raise PydanticCustomError(
                "ranks", f"{self.ranks} ranks, which are tp times pp; allowed: {MAX_RANKS}"
            )
        return self

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def own_stages(self) -> range:
        """Numbers of the stages whose ranks are children of the instance's own process."""
        return range(self.pp - len(self.stage_hosts))

    @property
    def remote_stages(self) -> dict[int, StageHostSettings]:
        """Settings of the stages that run in stage hosts, by number of the stage."""
        return dict(enumerate(self.stage_hosts, self.own_stages.stop))

    def stage_host_id(self, stage: int) -> InstanceId:
        """Return the id of the host that runs a stage, by which processes and page ports
        know it.
        """
        return stage_host_id(self.id, stage)

    def stage_nodes(self, own: NodeId) -> list[NodeId]:
        """Return the node of each stage; `own` is the node of the instance's own process."""
        remote = self.remote_stages
        stages = range(self.pp)
        return [remote[stage].node if stage in remote else own for stage in stages]

    def bound(self, host: str) -> str:
        """Return the address to listen at: `bind`, or else the `host` at which others reach the
        instance.
        """
        return self.bind or host

    @property
    def url(self) -> str:
        return f"http://{netloc(self.host, self.port)}"


_LABEL = r"[A-Za-z0-9._/-]+=[A-Za-z0-9._-]+"
_SELECTOR = f"^{_LABEL}(,{_LABEL})*$"


class NodeSettings(Settings):
    id: NodeId = Field(min_length=1, max_length=64, pattern=NAME)
    """Name of the node, unique in the cluster: letters, digits and `._-`."""
    instances: list[InstanceSettings] = Field(default=[])
    """Engines on this node: at least one, or a stage of another node's instance (`stage_hosts`)."""
    agent: AgentSettings = AgentSettings()
    """The node's agent, which runs with backup or gossip."""
    ray: str | None = Field(
        default=None, min_length=1, max_length=256, json_schema_extra=EMBEDDED_OR_DISTSERVE
    )
    """For `kvrs lab up --ray`: a resource of Ray. The node runs on any machine that has this
    resource, instead of the one at `host`, and takes 1 of it.
    """

    @property
    def agent_id(self) -> InstanceId:
        """Id of the node's agent as a peer of instances and a holder of checkpoints."""
        return InstanceId(f"agent-{self.id}")


class ServiceSettings(Settings):
    id: str = Field(min_length=1, max_length=24, pattern=NAME)  # An instance's id is `ID-ADDRESS`.
    """Name of the service, unique in the cluster. The instance at 10.0.0.7 is `ID-10.0.0.7`."""
    host: Host | None = None
    """Name that DNS resolves to the address of each instance."""
    pods: str | None = Field(default=None, max_length=512, pattern=_SELECTOR)
    """Instead of `host`, labels of pods, which are listed by the API of Kubernetes:
    `kvrs.io/role=decode,kvrs.io/model=m`. Needs `pip install 'kvrs[kubernetes]'`.
    """
    namespace: str = Field(default="default", min_length=1, max_length=63, pattern=NAME)
    """Namespace of the pods."""
    follow_nodes: bool = False
    """With pods: drain the instances on a node that is cordoned, not ready or under pressure. The
    account needs the verb `get` on `nodes`.
    """
    port: int = Field(ge=1, le=65535)
    """Port of the HTTP API, the same for all instances of the service."""
    role: Role = Field(strict=False)
    """prefill or decode."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.host is None) == (self.pods is None):
            raise ValueError("allowed: one of host and pods")
        if self.follow_nodes and self.pods is None:
            raise ValueError("follow_nodes: allowed with pods")
        return self

    def node(self, address: str) -> NodeSettings:
        """Make the settings of a node with one instance of the service, at a numeric address."""
        name = f"{self.id}-{address.replace(':', '-')}"
        instance = InstanceSettings(
            id=InstanceId(name), role=self.role, host=address, port=self.port
        )
        return NodeSettings(id=NodeId(name), instances=[instance])


def demo_nodes(count: int) -> list[NodeSettings]:
    """Make `count` nodes n0, n1, ..., each with a prefill instance p0, p1, ... and a decode
    instance d0, d1, ...
    """
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


def pipeline_nodes(count: int, stages: int, tp: int = 1) -> list[NodeSettings]:
    """Make `count` instances d0, d1, ... of one group, with `stages` stages each, and a node n0,
    n1, ... for each stage, those of d0 first. An instance's own process is on the node of its first
    stage.
    """
    nodes = [NodeSettings(id=NodeId(f"n{at}")) for at in range(count * stages)]
    for at in range(count):
        own = range(at * stages, (at + 1) * stages)
        instance = InstanceSettings(
            id=InstanceId(f"d{at}"),
            role=Role.BOTH,
            tp=tp,
            pp=stages,
            stage_hosts=[StageHostSettings(node=nodes[each].id) for each in own],
            group="pipelines",
        )
        nodes[own[0]] = nodes[own[0]].model_copy(update={"instances": [instance]})
    return nodes


class ClusterSettings(Settings):
    backend: Backend = Field(default=Backend.EMBEDDED, strict=False)
    """The engine of the instances: embedded, distserve (docs/guide/distserve.md), vllm
    (docs/guide/vllm.md) or sglang (docs/guide/sglang.md).
    """
    distserve: DistServeSettings = Field(default=DistServeSettings(), json_schema_extra=DISTSERVE)
    """Settings of the distserve backend."""
    model: str | None = None
    """A Hugging Face directory; with vLLM and SGLang also a name in the cache of the Hugging Face
    hub. null: a tiny random Llama, generated from `engine.seed`; with vLLM and SGLang the model
    that the servers name.
    """
    served_name: str | None = Field(default=None, min_length=1, max_length=128, pattern=SERVED_NAME)
    """Name of the model for clients. With vLLM, one of its --served-model-name. null: the name of
    the directory, or vLLM's first name.
    """
    engine: EngineSettings = Field(
        default=EngineSettings(), json_schema_extra=EMBEDDED_OR_DISTSERVE
    )
    """The engine; DistServe reads its device, page_size_tokens, pages, pace and seed."""
    allow_faults: bool = False
    """Instances obey POST /kvrs/v1/faults: slow or cut links, damaged pages. For experiments only.
    """
    drain_s: float = Field(default=30.0, ge=0, le=3600)
    """Longest time that a draining instance waits for its streams to be moved."""
    nodes: list[NodeSettings] = Field(default_factory=lambda: demo_nodes(2))
    """The machines, each with its instances and its agent."""
    services: list[ServiceSettings] = Field(default=[], max_length=64, json_schema_extra=VLLM)
    """Instances found by DNS or by labels of pods, beside those of `nodes`: each address is an
    instance on a node of its own. They are looked up every 5 s (docs/guide/fleet.md).
    """

    @property
    def roles(self) -> set[Role]:
        """Roles of all instances, including those found by DNS."""
        found = {instance.role for _, instance in self.instances()}
        return found | {service.role for service in self.services}

    def instances(self) -> Iterator[tuple[NodeSettings, InstanceSettings]]:
        return ((node, instance) for node in self.nodes for instance in node.instances)

    def row_holder(self, own: NodeId) -> NodeSettings | None:
        """Return the node whose agent keeps the second copy of a node's rows: the next node along
        the ring of ids whose agent has a row_port. None: this node has no row_port, or there is no
        other.
        """
        nodes = {node.id: node for node in self.nodes if node.agent.row_port is not None}
        others = [nodes[each] for each in nodes if own in nodes and each != own]
        return min(others, key=lambda each: along_ring(own, each.id), default=None)

    def find(self, instance_id: InstanceId) -> tuple[NodeSettings, InstanceSettings]:
        """Return a configured instance and its node.

        Raises:
            ConfigError: no such instance.
        """
        for node, instance in self.instances():
            if instance.id == instance_id:
                return node, instance
        allowed = ", ".join(instance.id for _, instance in self.instances())
        raise ConfigError(f"instance {instance_id!r} is not in cluster.nodes; allowed: {allowed}")

    def donors(self, instance_id: InstanceId) -> list[tuple[NodeSettings, InstanceSettings]]:
        """Return the other instances of the group and their nodes, along the ring of ids from the
        instance's own on; empty: no group. Raises like `find`.
        """
        _, own = self.find(instance_id)
        if own.group is None:
            return []
        members = [each for each in self.instances() if each[1].group == own.group]
        others = [each for each in members if each[1].id != own.id]
        return sorted(others, key=lambda each: along_ring(own.id, each[1].id))


Nodes = list[dict[str, Any]]  # `cluster.nodes` in plain data, with all keys.
Found = Mapping[str, frozenset[str]]  # Numeric addresses by id of the service.


def with_services(nodes: Nodes, services: Sequence[ServiceSettings], found: Found) -> Nodes:
    """The nodes of a file plus the nodes of the addresses; the file's own instances stay unchanged,
    even at a found address.
    """
    named = {(each["host"], each["port"]) for node in nodes for each in node["instances"]}
    added = [
        service.node(address).model_dump(mode="json")
        for service in services
        for address in sorted(found.get(service.id, ()))
        if (address, service.port) not in named
    ]
    return [*nodes, *added]


def newer(held: Found, services: Sequence[ServiceSettings], answers: Found) -> Found:
    """Addresses after a look-up: a name that resolves to no address keeps its former ones."""
    kept = {each.id: answers.get(each.id) or held.get(each.id) for each in services}
    return {name: addresses for name, addresses in kept.items() if addresses}


def single_changes(held: Found, wanted: Found) -> Iterator[tuple[str, str]]:
    """Service and address of all added addresses, then of all removed ones."""
    none: frozenset[str] = frozenset()
    for first, second in ((wanted, held), (held, wanted)):
        for name in wanted:
            for address in sorted(first.get(name, none) - second.get(name, none)):
                yield name, address


def changed(held: Found, service: str, address: str) -> Found:
    """A copy with this address added, or removed if it was present."""
    return {**held, service: held.get(service, frozenset()) ^ {address}}
