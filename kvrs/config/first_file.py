"""First configuration files, one for each backend."""

from kvrs.config.cluster import Backend
from kvrs.config.document import KeyPath, comment, commented_yaml, parse_yaml
from kvrs.config.schema import description

_HEADERS = {
    Backend.EMBEDDED: "kvrs with its embedded engine, on this machine: `kvrs lab up --config FILE` "
    "starts two nodes, each with a prefill and a decode instance, and a proxy.",
    Backend.VLLM: "kvrs in front of vLLM, one prefill and two decode instances that are already up "
    "(`kvrs docs vllm` has their command lines). Change hosts and ports, then run "
    "`kvrs proxy --config FILE`. The proxy serves the model that vLLM names; if the model's files "
    "are not on this machine, `kvrs doctor` says what that costs.",
    Backend.SGLANG: "kvrs in front of SGLang, two prefill and two decode servers that are already "
    "up (`kvrs docs sglang` has their command lines). Change hosts and ports, then run "
    "`kvrs proxy --config FILE`. The proxy serves the model that SGLang names; if the model's "
    "files are not on this machine, `kvrs doctor` says what that costs.",
    Backend.DISTSERVE: "kvrs in front of DistServe, two servers on this machine, without a GPU: "
    "`kvrs lab up --config FILE` (`kvrs docs distserve`). The environment variable DISTSERVE_HOME "
    "names the checkout.",
}
_REST = (
    "`kvrs config check FILE` reports the faults of this file. Keys that are not here have their "
    "defaults, which `kvrs config show FILE` prints."
)
_NODES = """
  - {id: n0, instances: [{id: p0, role: prefill}, {id: d0, role: decode}]}
  - {id: n1, instances: [{id: p1, role: prefill}, {id: d1, role: decode}]}
"""
_DOCUMENTS = {
    Backend.EMBEDDED: """
proxy: {port: 8000, admin_port: 8001}
cluster:
  model: null
  engine: {pages: 2048, max_model_len: 2048}
  nodes: NODES
policy: {name: auto}
backup: {mode: local}
""",
    Backend.VLLM: """
proxy: {port: 8000, admin_port: 8001, inexact: mark}
cluster:
  backend: vllm
  nodes:
  - id: n0
    instances:
    - {id: p0, role: prefill, host: 127.0.0.1, port: 8100}
    - {id: d0, role: decode, host: 127.0.0.1, port: 8200}
  - id: n1
    instances:
    - {id: d1, role: decode, host: 127.0.0.1, port: 8201}
policy: {name: auto}
""",
    Backend.SGLANG: """
proxy: {port: 8000, admin_port: 8001, inexact: mark}
cluster:
  backend: sglang
  nodes:
  - id: n0
    instances:
    - {id: p0, role: prefill, host: 127.0.0.1, port: 30000}
    - {id: d0, role: decode, host: 127.0.0.1, port: 30001}
  - id: n1
    instances:
    - {id: p1, role: prefill, host: 127.0.0.1, port: 30002}
    - {id: d1, role: decode, host: 127.0.0.1, port: 30003}
policy: {name: auto}
""",
    Backend.DISTSERVE: """
proxy: {port: 8000, admin_port: 8001}
cluster:
  backend: distserve
  distserve: {flags: []}
  model: null
  nodes: NODES
policy: {name: auto}
""",
}


def first_file(backend: Backend) -> str:
    """Return a commented first YAML file for a cluster with this backend."""
    document = parse_yaml(_DOCUMENTS[backend].replace(" NODES", _NODES.rstrip()))
    lines = [*comment(_HEADERS[backend]), *comment(_REST), ""]
    return "\n".join([*lines, commented_yaml(document, _of_sections_above)])


def _of_sections_above(path: KeyPath) -> str | None:
    return None if any(isinstance(part, int) for part in path) else description(path)
