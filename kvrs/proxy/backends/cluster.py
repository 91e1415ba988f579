"""The backends of a configuration's instances, and the connections that they share."""

import os
from pathlib import Path

import aiohttp

from kvrs.cluster.config import Backend as Engine
from kvrs.config import Config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.backends.pd import PdBackend
from kvrs.proxy.backends.peer import new_session
from kvrs.proxy.backends.vllm import Named, VllmBackend

VLLM_API_KEY = "KVRS_VLLM_API_KEY"


def new_engine_session(config: Config, token: str) -> aiohttp.ClientSession:
    """For everything that goes to instances. Our secret is none of the business of engines that are not ours."""
    if config.cluster.backend is Engine.VLLM:
        return new_session(os.environ.get(VLLM_API_KEY) or None)
    return new_session(token)


def open_backends(config: Config, session: aiohttp.ClientSession) -> dict[InstanceId, Backend]:
    """One per configured instance.

    Raises:
        ConfigError: the model of an engine that cannot describe it is not there.
    """
    if config.cluster.backend is not Engine.VLLM:
        return {instance.id: PdBackend(session, instance.url) for _, instance in config.cluster.instances()}
    model = config.cluster.model
    assert model is not None
    if not (Path(model) / "config.json").is_file():
        raise ConfigError([f"cluster.model: {model}/config.json is not there; allowed: a Hugging Face directory"])
    return {
        instance.id: VllmBackend(session, instance.url, Named(instance.id, node.id, instance.role, model))
        for node, instance in config.cluster.instances()
    }
