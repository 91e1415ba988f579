"""The chart of `deploy/helm` as helm renders it: by the program, or by helm's own library in the
environment of `make test-charts`.
"""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
ENVIRONMENT = {"KVRS_SECRET": "x" * 32, "KVRS_ADMIN_TOKEN": "y" * 32, "KVRS_POD": "east-0"}
# The one value without a default: a volume with the model's files.
PLAIN = {"model": {"volume": {"persistentVolumeClaim": {"claimName": "model", "readOnly": True}}}}
# Charts' own examples, of which each is rendered, by the names of their files.
EXAMPLES = sorted(path.name for path in (CHART / "ci").iterdir())

_VENV = ROOT / ".venv-charts" / "bin" / "python"
_PYTHON = os.environ.get("KVRS_CHARTS_PYTHON") or (str(_VENV) if _VENV.exists() else None)
_BY_LIBRARY = """
import json, sys
from helm_python.chart import Chart, lint
path, namespace = sys.argv[1:]
assert not lint(path)["errors"]
with Chart.load(path) as chart:
    made = chart.render(values=json.load(sys.stdin), name="east", namespace=namespace)
print("\\n---\\n".join(text for name, text in made.items() if name.endswith(".yaml")))
"""

needs_helm = pytest.mark.skipif(
    shutil.which("helm") is None and _PYTHON is None,
    reason="no helm here, and no environment of `make test-charts`",
)
VALIDATE = shutil.which("kubernetes-validate") or (
    str(Path(_PYTHON).with_name("kubernetes-validate")) if _PYTHON else None
)


def rendered(own: dict[str, Any], namespace: str = "prod") -> str:
    """The manifests of release `east` with these values; a failure has helm's message."""
    if shutil.which("helm") is None:
        assert _PYTHON is not None
        command = [_PYTHON, "-c", _BY_LIBRARY, str(CHART), namespace]
    else:
        command = ["helm", "template", "east", str(CHART), "--namespace", namespace, "-f", "-"]
    done = subprocess.run(
        command, input=json.dumps(own), capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise ChartError(done.stderr)
    return done.stdout


class ChartError(Exception):
    """Helm refuses the values."""


def by_name(manifests: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Manifests by kind and name."""
    return {
        (each["kind"], each["metadata"]["name"]): each
        for each in yaml.safe_load_all(manifests)
        if each is not None
    }


def found(own: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The manifests that helm makes of these values, by kind and name."""
    return by_name(rendered(own))


@cache
def example(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / name).read_text())
    return values


def findings_of_restricted(spec: dict[str, Any]) -> list[str]:
    """Violations by a pod of the Pod Security Standard `restricted` of Kubernetes (its controls,
    https://kubernetes.io/docs/concepts/security/pod-security-standards/).
    """
    pod = spec.get("securityContext", {})
    wrong = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    allowed = {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
        *("persistentVolumeClaim", "projected", "secret"),
    }
    for volume in spec.get("volumes", []):
        if kinds := volume.keys() - {"name"} - allowed:
            wrong.append(f"volume {volume['name']}: {kinds}")
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        name, own = container["name"], container.get("securityContext", {})
        merged = pod | own
        profile = merged.get("seccompProfile", {}).get("type")
        capabilities = own.get("capabilities", {})
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": merged.get("runAsNonRoot") is True,
            "runAsUser": merged.get("runAsUser") != 0,
            "seccompProfile": profile in ("RuntimeDefault", "Localhost"),
            "capabilities.drop": capabilities.get("drop") == ["ALL"],
            "capabilities.add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        }
        wrong += [f"{name}: {check}" for check, holds in checks.items() if not holds]
    return wrong


def size_bytes(text: str) -> int:
    """A quantity of Kubernetes: `88Gi`."""
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi")) << 30


def tier_of(transfer: dict[str, Any]) -> dict[str, Any]:
    """The options of vLLM's CPU tier with kvrs in it, of a `--kv-transfer-config`; NIXL, if it is
    there, comes first.
    """
    first, *others = (
        transfer["kv_connector_extra_config"]["connectors"]
        if transfer["kv_connector"] == "MultiConnector"
        else [transfer]
    )
    if others:
        assert first["kv_connector"] == "NixlConnector"
        (first,) = others
    assert first["kv_connector"] == "KvrsOffloading"
    assert first["kv_connector_module_path"] == "kvrs.vllm.offloading"
    assert first["kv_role"] == "kv_both"
    found: dict[str, Any] = first["kv_connector_extra_config"]
    return found


def check_memory_of_a_restart(pod: dict[str, Any], server: dict[str, Any], more: int = 0) -> None:
    """A server that starts again has its region beside that of the one before, which its agent
    still holds: /dev/shm, what is requested for the container, and its limit, if it has one, are
    for both, /dev/shm for `more` bytes beside them.
    """
    region = tier_of(json.loads(server["args"][1]))["cpu_bytes_to_use"]
    (name,) = (each["name"] for each in server["volumeMounts"] if each["mountPath"] == "/dev/shm")
    (shm,) = (each["emptyDir"] for each in pod["volumes"] if each["name"] == name)
    resources = server["resources"]

    assert shm["medium"] == "Memory"
    assert size_bytes(shm["sizeLimit"]) > 2 * region + more
    assert size_bytes(resources["requests"]["memory"]) > 2 * region
    limit = resources["limits"].get("memory")
    assert limit is None or size_bytes(limit) > 2 * region
