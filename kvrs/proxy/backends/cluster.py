"""The backends of a configuration's instances, and the connections that they share."""

import os
from pathlib import Path

from kvrs.config.cluster import Backend as Engine
from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.file import Config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.proving import instance_keys
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.backends.pd import PdBackend
from kvrs.proxy.backends.vllm import ConfiguredIdentity, VllmBackend
from kvrs.proxy.wire.pool import Access, EngineLinks
from kvrs.tls import Certificates

VLLM_API_KEY = "KVRS_VLLM_API_KEY"


def new_engine_links(config: Config, secret: bytes, tls: Certificates | None = None) -> EngineLinks:
    """The connections for all requests to instances. vLLM cannot prove itself: it gets nothing that
    comes of the cluster's secret, but its own API key.
    """
    if config.cluster.backend is Engine.VLLM:
        return EngineLinks(Access(token=os.environ.get(VLLM_API_KEY) or None))
    instances = [instance for _, instance in config.cluster.instances()]
    return EngineLinks(Access(instance_keys(secret, instances), tls))


def open_backends(config: Config, links: EngineLinks) -> dict[InstanceId, Backend]:
    """One per configured instance.

    Raises:
        ConfigError: the directory of the model of an engine that does not report its geometry is
            missing.
    """
    model = config.cluster.model
    if config.cluster.backend is Engine.VLLM and not (Path(model or "") / "config.json").is_file():
        raise ConfigError(
            f"cluster.model: {model}/config.json is not there; allowed: a Hugging Face directory"
        )
    return {
        instance.id: open_backend(config, links, node, instance)
        for node, instance in config.cluster.instances()
    }


def open_backend(
    config: Config, links: EngineLinks, node: NodeSettings, instance: InstanceSettings
) -> Backend:
    if config.cluster.backend is not Engine.VLLM:
        return PdBackend(links, config.url_of(instance))
    model = config.cluster.model
    assert model is not None
    identity = ConfiguredIdentity(instance.id, node.id, instance.role, model)
    return VllmBackend(links, instance.url, identity)
