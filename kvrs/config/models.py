"""Section `models` of the configuration: several models at one port for clients, each with
instances, a policy and limits of its own.

Each entry yields the document of a whole configuration, with one model. The sections of the entry
lie over those of the file, key by key; what all models of a proxy would share otherwise is made
that model's own: the id, the ports for operators and peers, the event log, a share of the limits.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import Field

from kvrs.config.addresses import addresses_of, faults_of_addresses
from kvrs.config.backup import BackupSettings, StatePlaneSettings
from kvrs.config.cluster import SERVED_NAME, ClusterSettings
from kvrs.config.engine import ElasticSettings
from kvrs.config.gossip import GossipSettings
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.config.profiles import ProfileSettings
from kvrs.config.proxy import ADMIN_PORT_STEP, LEAST_MIRROR_BYTES, ProxySettings
from kvrs.config.settings import Settings
from kvrs.config.source import merged
from kvrs.config.speculation import SpeculationSettings
from kvrs.config.transfer import TransferSettings
from kvrs.errors import ConfigError

MAX_MODELS = 32

# Settings of the process and of its one port for clients.
_OF_THE_PROCESS = (
    *("id", "host", "port", "workers", "allow_anonymous", "allowed_origins", "tls"),
    *("idle_timeout_s", "drain_delay_s", "drain_s", "reload_on_change"),
)
# Distance between those of two models.
_PORTS = {"admin_port": ADMIN_PORT_STEP, "peer_port": 1, "gossip_port": 1}


class ModelSettings(Settings):
    name: str = Field(min_length=1, max_length=128, pattern=SERVED_NAME)
    """Name that clients ask for, unique: letters, digits and `._:/-`."""
    proxy: ProxySettings | None = None
    """Its limits and its ports for operators and peers; not those of the port for clients."""
    cluster: ClusterSettings | None = None
    """Its nodes, which are needed, and its engine."""
    policy: PolicySettings | None = None
    """Its policy."""
    slo: SloSettings | None = None
    """Latency that its clients expect."""
    transfer: TransferSettings | None = None
    """How its KV pages move."""
    backup: BackupSettings | None = None
    """Checkpoints of its KV."""
    state_plane: StatePlaneSettings | None = None
    """Memory that outlives the processes of its instances."""
    elastic: ElasticSettings | None = None
    """Reaction of its instances to the loss of ranks."""
    speculation: SpeculationSettings | None = None
    """Its drafts."""
    profiles: ProfileSettings | None = None
    """Its measured tables."""

    @property
    def suffix(self) -> str:
        """The part that the ids of its proxies end in."""
        return re.sub("[.:/]", "-", self.name)


class OfOneModel(Protocol):
    """A configuration, as far as it is compared with those of other models."""

    @property
    def cluster(self) -> ClusterSettings: ...
    @property
    def proxy(self) -> ProxySettings: ...
    @property
    def gossip(self) -> GossipSettings: ...


AnyConfig = TypeVar("AnyConfig", bound=OfOneModel)


def given_by(settings: Settings) -> dict[str, Any]:
    """The keys that a section names, without defaults and without sections that are null."""
    given = settings.model_dump(mode="json", exclude_unset=True)
    return {key: value for key, value in given.items() if value is not None}


def of_model(configs: Mapping[str, AnyConfig], name: str | None) -> AnyConfig:
    """Raises ConfigError: there is no such model."""
    if not configs:
        raise ConfigError(f"models: got {name!r}; allowed: no model, as the file has only one")
    if name is None or name not in configs:
        got = f"{len(configs)}" if name is None else repr(name)
        raise ConfigError(
            f"models: got {got}; allowed: one of {', '.join(configs)} (--model), or the file of "
            f"one, as `kvrs config show FILE --model {next(iter(configs))}` prints"
        )
    return configs[name]


def of_member(configs: Mapping[str, AnyConfig], member: str) -> AnyConfig:
    """That of the model with this node or instance; raises ConfigError: none has it."""
    ids = {model: config.cluster.member_ids for model, config in configs.items()}
    for model, config in configs.items():
        if member in ids[model]:
            return config
    allowed = ", ".join(sorted(set().union(*ids.values())))
    raise ConfigError(f"models: none has {member!r}; allowed: {allowed}")


def document_for(base: Settings, models: Sequence[ModelSettings], index: int) -> dict[str, Any]:
    """The document of one model's configuration; `base` is the file's."""
    model = models[index]
    below = {key: value for key, value in given_by(base).items() if key != "models"}
    above = {key: value for key, value in given_by(model).items() if key != "name"}
    document: dict[str, Any] = merged(below, above)
    whole = ProxySettings.model_validate(below.get("proxy", {}))
    own: Mapping[str, Any] = above.get("proxy", {})
    document["proxy"] = {**document.get("proxy", {}), **_made_own(whole, own, models, index)}
    # A model with services alone has none of the nodes that a file has by default.
    given = {"nodes": [], **document.get("cluster", {})}
    document["cluster"] = {**given, "served_name": model.name}
    return document


def _made_own(
    whole: ProxySettings, own: Mapping[str, Any], models: Sequence[ModelSettings], index: int
) -> dict[str, Any]:
    """The keys of a model's proxy that come of the file's, but for those that the entry names."""
    suffix, count = models[index].suffix, len(models)
    ports = {key: getattr(whole, key) for key in _PORTS}
    found: dict[str, Any] = {
        key: port + _PORTS[key] * index if port else 0 for key, port in ports.items()
    }
    found["peers"] = [
        {"id": f"{peer.id}-{suffix}", "host": peer.host, "peer_port": peer.peer_port + index}
        for peer in whole.peers
    ]
    if (numbered := whole.numbered_peers) is not None:
        changes = {"id": f"{numbered.id}-{suffix}", "peer_port": numbered.peer_port + index}
        found["numbered_peers"] = numbered.model_dump(mode="json") | changes
    if whole.event_log is not None:
        given = Path(whole.event_log)
        found["event_log"] = str(given.with_name(f"{given.stem}.{suffix}{given.suffix}"))
    longest_bytes = own.get("max_body_bytes", whole.max_body_bytes)
    found["max_streams"] = max(1, whole.max_streams // count)
    found["body_budget_bytes"] = max(2 * longest_bytes, whole.body_budget_bytes // count)
    found["mirror_bytes"] = max(LEAST_MIRROR_BYTES, whole.mirror_bytes // count)
    of_entry = {key: value for key, value in found.items() if key not in own}
    return of_entry | {"id": f"{whole.id}-{suffix}"}


def faults_of_entries(base: Settings, models: Sequence[ModelSettings]) -> Iterator[str]:
    """Those that are seen before each model has a configuration."""
    file = given_by(base)
    if "nodes" in file.get("cluster", {}):
        yield "cluster.nodes: given beside models; allowed: the nodes of each in models"
    if "served_name" in file.get("cluster", {}):
        yield "cluster.served_name: given beside models; allowed: the name of each in models"
    proxy = ProxySettings.model_validate(file.get("proxy", {}))
    if proxy.workers > 1:
        yield (
            f"proxy.workers: got {proxy.workers} beside models, which one process serves; "
            f"allowed: 1"
        )
    for peer in proxy.peers:
        if peer.workers > 1:
            yield f"proxy.peers: {peer.id!r} has {peer.workers} workers; allowed beside models: 1"
    if proxy.numbered_peers is not None and proxy.numbered_peers.workers > 1:
        yield (
            f"proxy.numbered_peers.workers: got {proxy.numbered_peers.workers} beside models; "
            f"allowed: 1"
        )
    seen: dict[str, int] = {}
    for index, model in enumerate(models):
        if (other := seen.setdefault(model.suffix, index)) != index:
            yield (
                f"models.{index}.name: got {model.name!r} beside {models[other].name!r}; "
                f"allowed: names that differ in more than `.:/-`"
            )
        given = given_by(model)
        if not given.get("cluster", {}).get("nodes") and "services" not in given.get("cluster", {}):
            yield f"models.{index}.cluster.nodes: missing; allowed: the nodes of this model"
        if "served_name" in given.get("cluster", {}):
            yield (
                f"models.{index}.cluster.served_name: given beside name; allowed: name, which "
                f"clients ask for"
            )
        own = [key for key in ProxySettings.model_fields if key not in _OF_THE_PROCESS]
        for key in given.get("proxy", {}):
            if key in _OF_THE_PROCESS:
                yield (
                    f"models.{index}.proxy.{key}: is the same for all models; allowed: "
                    f"proxy.{key}, or here {', '.join(own)}"
                )


def joined(base: Settings, documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The document of several models of which each has this whole document; `base` is that of a
    file of them.
    """
    document = given_by(base)
    document["models"] = []
    for name, of_model in documents.items():
        entry = {key: of_model[key] for key in ModelSettings.model_fields if key != "name"}
        for section, left_out in (("proxy", _OF_THE_PROCESS), ("cluster", ("served_name",))):
            entry[section] = {
                key: value for key, value in entry[section].items() if key not in left_out
            }
        document["models"].append({"name": name, **entry})
    return document


def faults_of_all(models: Sequence[ModelSettings], found: Sequence[Sequence[str]]) -> list[str]:
    """The faults that were found of each model; one that all have once, as the file's."""
    shared = set.intersection(*map(set, found)) if len(found) > 1 else set()
    named: list[str] = []
    for index, faults in enumerate(found):
        for fault in faults:
            own = _named(fault, models[index], index)
            is_files = fault in shared and not own.startswith("models.")
            named.append(fault if is_files else own)
    return list(dict.fromkeys(named))


def _named(fault: str, model: ModelSettings, index: int) -> str:
    """A fault of one model's configuration: with the path in the file of the setting it names."""
    found = re.match(r"([a-z_]+)\.?([a-z_]*)", fault)
    own = given_by(model).get(found[1]) if found is not None else None
    if own is not None and found is not None and (not found[2] or found[2] in own):
        return f"models.{index}.{fault}"
    return f"{fault} (model {model.name!r})"


def faults_between(configs: Mapping[str, OfOneModel]) -> Iterator[str]:
    """Ids and ports that two models have; `configs` by model."""
    owners: dict[tuple[str, str], str] = {}
    addresses: list[tuple[str, int]] = []
    for index, (model, config) in enumerate(configs.items()):
        for what, name in dict.fromkeys(_ids(config.cluster)):
            if (other := owners.setdefault((what, name), model)) != model:
                yield (
                    f"models.{index}.cluster.nodes: {what} id {name!r} is used by model {other!r} "
                    f"too; allowed: ids that no other model has"
                )
        proxy = config.proxy.model_copy(update={"port": 0} if index else {})
        gossips = config.gossip.enabled
        addresses += addresses_of(config.cluster, proxy, with_gossip=gossips)
    for fault in faults_of_addresses(addresses):
        yield f"models: {fault}"


def _ids(cluster: ClusterSettings) -> Iterator[tuple[str, str]]:
    for node in cluster.nodes:
        yield "node", node.id
        for instance in node.instances:
            yield "instance", instance.id
    for service in cluster.services:
        yield "service", service.id
