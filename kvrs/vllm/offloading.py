"""vLLM's OffloadingConnector with kvrs's ledger of rows and tier that loads rows.

`--kv-transfer-config '{"kv_connector": "KvrsOffloading", "kv_connector_module_path":
"kvrs.vllm.offloading", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": N,
"kvrs": {"config": FILE, "instance": ID}}}'`. Other options of upstream's connector stand beside
`kvrs` and override the defaults set here.
"""

import logging
from contextlib import suppress
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvrs.vllm import adapters, space
from kvrs.vllm.start_check import faults_of_tier

log = logging.getLogger(__name__)

_DEFAULTS = {
    "spec_name": "TieringOffloadingSpec",
    # vLLM keeps only prompts by default, but a cut stream needs the KV of its output too.
    "offload_prompt_only": False,
    "eviction_policy": "KvrsPolicy",
    "cache_policy_module_path": "kvrs.vllm.ledger",
}


class KvrsOffloading(OffloadingConnector):  # type: ignore[misc]  # vLLM is not checked.
    """The connector in the scheduler's and each worker's process; the API server uses only its
    class, for counters.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        fill(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        try:
            adapters.begin(request.lora_request)
        except Exception:
            log.exception("rows of a request are not shared")
        super().on_new_request(request)
        adapters.end()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *more: Any) -> Any:
        fill(vllm_config)
        return super().build_prom_metrics(vllm_config, *more)


def fill(vllm_config: Any) -> None:
    """Add kvrs's defaults to the connector's options, and keep the configuration for
    `space.fields_of`. After an error the connector works as vLLM's own.
    """
    try:
        space.remember(vllm_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        if (given := options.pop("kvrs", None)) is None:
            return  # The options were completed before.
        if not isinstance(given, dict):
            log.error("kvrs is off in this vLLM: kvrs: got %.100r; allowed: an object", given)
            return
        if faults := [*faults_of_tier(KvrsOffloading)]:
            log.error("kvrs is off in this vLLM: %s", "; ".join(faults))
            return
        for name, value in _DEFAULTS.items():
            options.setdefault(name, value)
        tier = {"type": "KvrsTier", "module_path": "kvrs.vllm.tier", **given}
        options["secondary_tiers"] = [tier, *options.get("secondary_tiers", ())]
    except ImportError as error:
        log.error("kvrs is off in this vLLM: %s", error)
    except Exception:
        log.exception("kvrs is off in this vLLM")


# MultiConnector finds the class of a connector's counters only by name, in the API server, and a
# missing class ends all requests.
with suppress(Exception):  # The name may be registered already.
    KVConnectorFactory.register_connector(
        KvrsOffloading.__name__, __name__, KvrsOffloading.__name__
    )
