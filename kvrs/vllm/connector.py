"""A no-op connector under the name of earlier versions: a server started with its flags runs as
stock vLLM, and its log names the flags to use instead.
"""

import json
import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

log = logging.getLogger(__name__)

_FLAGS = {
    "kv_connector": "KvrsOffloading",
    "kv_connector_module_path": "kvrs.vllm.offloading",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": "BYTES",
        "kvrs": {"config": "FILE", "instance": "ID"},
    },
}
_HMA: Any = getattr(base, "SupportsHMA", object)


class KvrsConnector(base.KVConnectorBase_V1, _HMA):  # type: ignore[misc]  # vLLM is not checked.
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is base.KVConnectorRole.SCHEDULER:
            log.error(
                "kvrs is off in this vLLM: KvrsConnector does nothing any more; use "
                "--kv-transfer-config '%s' (kvrs docs vllm-tier)",
                json.dumps(_FLAGS),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, *_: Any, **__: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, *_: Any, **__: Any) -> Any:
        return base.KVConnectorMetadata()

    def request_finished_all_groups(self, *_: Any, **__: Any) -> tuple[bool, None]:
        return False, None

    def wait_for_save(self, *_: Any, **__: Any) -> None:
        """Do nothing when vLLM calls this hook."""

    update_state_after_alloc = wait_for_save
    start_load_kv = wait_for_save
    wait_for_layer_load = wait_for_save
    save_kv_layer = wait_for_save
    # A `MultiConnector` passes data of its other connectors, which the hook of vLLM's class may
    # refuse.
    set_xfer_handshake_metadata_pp_aware = wait_for_save
