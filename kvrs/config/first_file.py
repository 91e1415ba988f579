"""First configuration files, one for each backend."""

from typing import Any, assert_never

from kvrs.config.cluster import Backend, demo_nodes
from kvrs.config.commented import comment, commented_yaml
from kvrs.config.reference import description

_EMBEDDED = (
    "kvrs with its embedded engine, on this machine: `kvrs up --config FILE` starts two nodes, "
    "each with a prefill and a decode instance, and a proxy."
)
_VLLM = (
    "kvrs in front of vLLM, one prefill and two decode instances that are already up "
    "(docs/vllm.md has their command lines). To be changed: model, hosts, ports and profile. Then "
    "`export KVRS_SECRET=$(openssl rand -hex 32)` and `kvrs proxy --config FILE`."
)
_DISTSERVE = (
    "kvrs in front of DistServe, two servers on this machine, without a GPU: "
    "`kvrs up --config FILE` (docs/distserve.md). To be changed: home, the checkout."
)
_REST = (
    "`kvrs config check FILE` reports what is wrong with it. Keys that are not here have their "
    "defaults: `kvrs config show FILE`."
)


def first_file(backend: Backend) -> str:
    """A commented YAML file for instances of this kind."""
    match backend:
        case Backend.EMBEDDED:
            header, document = _EMBEDDED, _embedded()
        case Backend.VLLM:
            header, document = _VLLM, _vllm()
        case Backend.DISTSERVE:
            header, document = _DISTSERVE, _distserve()
        case _:
            assert_never(backend)
    return "\n".join(
        [*comment(header), *comment(_REST), "", commented_yaml(document, _of_sections_above)]
    )


def _of_sections_above(path: tuple[str | int, ...]) -> str | None:
    return None if any(isinstance(part, int) for part in path) else description(path)


def _embedded() -> dict[str, Any]:
    nodes = [
        {
            "id": str(node.id),
            "instances": [{"id": str(i.id), "role": i.role.value} for i in node.instances],
        }
        for node in demo_nodes(2)
    ]
    engine = {"pages": 2048, "max_model_len": 2048}
    return {
        "proxy": {"port": 8000, "admin_port": 8001},
        "cluster": {"model": None, "engine": engine, "nodes": nodes},
        "policy": {"name": "auto"},
        "backup": {"mode": "local"},
    }


def _vllm() -> dict[str, Any]:
    instances = (
        [
            {"id": "p0", "role": "prefill", "host": "127.0.0.1", "port": 8100},
            {"id": "d0", "role": "decode", "host": "127.0.0.1", "port": 8200},
        ],
        [{"id": "d1", "role": "decode", "host": "127.0.0.1", "port": 8201}],
    )
    nodes = [{"id": f"n{index}", "instances": each} for index, each in enumerate(instances)]
    return {
        "proxy": {"port": 8000, "admin_port": 8001, "inexact": "mark"},
        "cluster": {"backend": "vllm", "model": "/models/Llama-3.1-8B-Instruct", "nodes": nodes},
        "policy": {"name": "auto"},
        "profiles": {"prefill": "llama-3.1-8b-h100-vllm-tp1"},
    }


def _distserve() -> dict[str, Any]:
    return {
        "proxy": {"port": 8000, "admin_port": 8001},
        "cluster": {
            "backend": "distserve",
            "distserve": {"home": "DistServe", "flags": []},
            "model": None,
            "nodes": _embedded()["cluster"]["nodes"],
        },
        "policy": {"name": "auto"},
    }
