"""Backends of the configured instances, and the connections that they share."""

import os

from kvrs.config.cluster import Backend as Engine
from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.file import Config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.net.proving import instance_keys
from kvrs.net.tls import Certificates
from kvrs.protocol.instance import Role
from kvrs.protocol.rows import params_key
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.backends.model_files import ModelFiles, fault_of_model, find_model
from kvrs.proxy.backends.stock_facts import ConfiguredIdentity
from kvrs.proxy.wire.upstream import Access, EngineLinks

VLLM_API_KEY = "KVRS_VLLM_API_KEY"
# By stock engine: the environment variable with its API key.
API_KEYS = {Engine.VLLM: VLLM_API_KEY, Engine.SGLANG: "KVRS_SGLANG_API_KEY"}


def new_engine_links(config: Config, secret: bytes, tls: Certificates | None = None) -> EngineLinks:
    """Make the connections for all requests to instances. Connections to a stock engine carry the
    engine's API key and no key of the cluster, because the engine cannot prove its identity.
    """
    coalesce_s = config.proxy.coalesce_ms / 1000
    if (variable := API_KEYS.get(config.cluster.backend)) is not None:
        return EngineLinks(Access(token=os.environ.get(variable) or None), coalesce_s)
    instances = [instance for _, instance in config.cluster.instances()]
    return EngineLinks(Access(instance_keys(secret, instances), tls), coalesce_s)


def open_backends(
    config: Config, links: EngineLinks, secret: bytes, files: ModelFiles | None = None
) -> dict[InstanceId, Backend]:
    """Make a backend for each configured instance. `files`: the model's files; None: look for them.

    Raises:
        ConfigError: the engine does not report its geometry, and the configured model is not on
            this machine.
    """
    model = config.cluster.model
    if config.cluster.backend.is_stock and model is not None and find_model(model) is None:
        raise ConfigError(fault_of_model(model))
    files = files or ModelFiles(model)
    return {
        instance.id: open_backend(config, links, secret, node, instance, files)
        for node, instance in config.cluster.instances()
    }


def open_backend(
    config: Config,
    links: EngineLinks,
    secret: bytes,
    node: NodeSettings,
    instance: InstanceSettings,
    files: ModelFiles,
) -> Backend:
    """Make the backend of one instance. Only its engine's module is imported."""
    if not config.cluster.backend.is_stock:
        from kvrs.proxy.backends.pd import PdBackend

        return PdBackend(links, config.url_of(instance))
    identity = ConfiguredIdentity(
        instance.id,
        node.id,
        instance.role,
        files,
        hands_off=Role.PREFILL in config.cluster.roles,
        served_name=config.cluster.served_name,
    )
    if config.cluster.backend is Engine.SGLANG:
        from kvrs.proxy.backends.sglang import SglangBackend

        return SglangBackend(links, instance.url, identity)
    from kvrs.proxy.backends.vllm import VllmBackend

    return VllmBackend(links, instance.url, identity, params_key(secret, instance.id))
