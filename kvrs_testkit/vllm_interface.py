"""Stand-ins for what the kvrs connector imports of vLLM: hooks with the parameters of 0.32."""

import importlib
import sys
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from types import ModuleType
from typing import Any

import pytest

from kvrs.vllm.block_table import READS

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class Role(Enum):
    SCHEDULER = auto()
    WORKER = auto()


class Metadata(ABC):  # noqa: B024 - as vLLM's
    pass


class WorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other: Any) -> Any: ...


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


class Connector:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_transfer_config = vllm_config, vllm_config.kv_transfer_config
        self._connector_metadata: Any = None

    @property
    def requires_kv_delivery(self) -> bool:
        return True

    def register_kv_caches(self, kv_caches: Any) -> None: ...
    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_name: Any) -> None: ...
    @abstractmethod
    def save_kv_layer(
        self, layer_name: Any, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...
    @abstractmethod
    def wait_for_save(self) -> None: ...
    def get_finished(self, finished_req_ids: Any) -> Any: ...
    def get_block_ids_with_load_errors(self) -> Any: ...
    def shutdown(self) -> None: ...
    def build_connector_worker_meta(self) -> Any: ...
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None: ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: Any) -> Any: ...
    @abstractmethod
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: Any
    ) -> Any: ...
    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    def on_new_request(self, request: Any) -> None: ...
    def update_connector_output(self, connector_output: Any) -> None: ...
    def request_finished(self, request: Any, block_ids: Any) -> Any: ...
    def reset_cache(self) -> Any: ...
    def has_pending_push_work(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> Any: ...


class KVCacheBlocks:
    """The blocks of a request."""

    def get_block_ids(self, allow_none: bool = False) -> Any: ...


class GpuBlockPool:
    def __init__(self, num_gpu_blocks: int) -> None:
        self.blocks = [*range(num_gpu_blocks)]

    def touch(self, blocks: Any) -> None: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...


class VllmRequest:
    def __init__(self, request_id: str) -> None:
        unset: Any = None
        self.request_id, self.status, self.cache_salt = request_id, unset, unset
        self.kv_transfer_params, self.lora_request, self.mm_features = unset, unset, unset
        self.all_token_ids, self.num_computed_tokens = unset, 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class RequestStatus(Enum):
    FINISHED_LENGTH_CAPPED = auto()


def get_tensor_model_parallel_rank() -> int:
    return 0


def _class(name: str, like: type) -> type:
    """A class whose members a test may change."""
    members = {key: each for key, each in vars(like).items() if key not in _OF_CLASSES}
    return type(name, (), members)


_OF_CLASSES = ("__dict__", "__weakref__")


def interface() -> dict[str, dict[str, Any]]:
    """Members of vLLM's modules, as one version has them; its classes may be changed."""
    hooks = {name: hook for name, hook in vars(Connector).items() if name not in _OF_CLASSES}
    return {
        f"{V1}.base": {
            "KVConnectorMetadata": Metadata,
            "KVConnectorWorkerMetadata": WorkerMetadata,
            "KVConnectorRole": Role,
            "SupportsHMA": SupportsHMA,
            "KVConnectorBase_V1": ABCMeta("KVConnectorBase_V1", (), hooks),
        },
        "vllm.v1.core.sched.output": {
            owner: type(owner, (), {"__annotations__": dict.fromkeys(names, Any)})
            for owner, names in READS.items()
        },
        "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": _class("KVCacheBlocks", KVCacheBlocks)},
        "vllm.v1.core.kv_cache_utils": {
            "KVCacheBlock": type("KVCacheBlock", (), {"block_hash": None})
        },
        "vllm.v1.core.block_pool": {"BlockPool": _class("BlockPool", GpuBlockPool)},
        "vllm.v1.outputs": {
            "KVConnectorOutput": type(
                "KVConnectorOutput", (), {"__annotations__": {"kv_connector_worker_meta": Any}}
            )
        },
        "vllm.v1.request": {
            "Request": _class("Request", VllmRequest),
            "RequestStatus": RequestStatus,
        },
        "vllm.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": get_tensor_model_parallel_rank
        },
    }


def load_connector(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, dict[str, Any]]], None] = lambda _: None,
) -> ModuleType:
    """The connector's module beside a vLLM in which `change` has changed what `interface` gives."""
    stand_ins = interface()
    change(stand_ins)
    for path in stand_ins:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for path, members in stand_ins.items():
        vars(sys.modules[path]).update(members)
        parent, _, name = path.rpartition(".")
        setattr(sys.modules[parent], name, sys.modules[path])
    monkeypatch.delitem(sys.modules, "kvrs.vllm.connector", raising=False)
    module = importlib.import_module("kvrs.vllm.connector")
    monkeypatch.delitem(sys.modules, "kvrs.vllm.connector")
    return module
