"""The image, units and manifests of `deploy/` go with each other and with kvrs."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrs.config.backup import BackupMode
from kvrs.config.cluster import Backend
from kvrs.config.exposure import faults_of_proxy
from kvrs.config.file import Config, load_config
from kvrs.protocol.instance import Role
from tests.packaging.charts import (
    check_memory_of_a_restart,
    findings_of_restricted,
    size_bytes,
    tier_of,
)

DEPLOY = Path(__file__).parents[2] / "deploy"
ENVIRONMENT = {"KVRS_SECRET": "x" * 32, "KVRS_ADMIN_TOKEN": "y" * 32}
_WITH_VLLM = ("machines.yaml", "vllm.yaml")


def documents() -> dict[str, list[dict[str, Any]]]:
    """The manifests by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "kvrs.yaml").read_text()):
        assert {"apiVersion", "kind", "metadata"} <= each.keys()
        found.setdefault(each["kind"], []).append(each)
    return found


def configs(directory: Path) -> dict[str, Config]:
    """The configuration of each pod, as its proxy reads it: one file for all."""
    (config_map,), (pods,) = documents()["ConfigMap"], documents()["StatefulSet"]
    ((name, text),) = config_map["data"].items()
    path = directory / name
    path.write_text(text)
    names = [f"kvrs-{number}" for number in range(pods["spec"]["replicas"])]
    return {pod: load_config(path, ENVIRONMENT | {"KVRS_POD": pod}) for pod in names}


def test_the_image_is_slim_and_runs_as_no_root() -> None:
    """Two stages, no torch, a numeric user (which Kubernetes can check), no shell between."""
    lines = re.sub(r"\\\n", "", (DEPLOY / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    last = max(index for index, (word, _) in enumerate(steps) if word == "FROM")

    assert {word for word, _ in steps} <= {
        *("FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL"),
        *("ENTRYPOINT", "CMD"),
    }
    assert all("-slim" in rest for word, rest in steps if word == "FROM")
    assert ["USER", "10001"] in steps[last:]
    assert not any("[engine]" in rest or "torch" in rest for _, rest in steps)
    assert all(rest.startswith("[") for word, rest in steps if word in ("ENTRYPOINT", "CMD"))
    root = DEPLOY.parent
    copied = [rest.split()[:-1] for word, rest in steps[:last] if word == "COPY"]
    assert all((root / name).exists() for names in copied for name in names)


def test_each_pod_has_a_configuration_that_can_run(tmp_path: Path) -> None:
    """Every replica has its own id, and the others as peers by the headless service."""
    (pods,) = documents()["StatefulSet"]
    found = configs(tmp_path)

    for name, config in found.items():
        others = {peer.id: peer.host for peer in config.proxy.peers}
        service = pods["spec"]["serviceName"]
        assert config.proxy.id == name
        assert found.keys() - {name} == others.keys()
        assert others == {other: f"{other}.{service}" for other in others}
        assert f"{name}.{service}" in config.security.hosts
        assert [*faults_of_proxy(config, ENVIRONMENT)] == []


def test_manifests_go_with_the_configuration(tmp_path: Path) -> None:
    """Ports, time to drain, services, secrets, budget for disruptions, rolling update."""
    found, proxy = documents(), configs(tmp_path)["kvrs-0"].proxy
    (pods,) = found["StatefulSet"]
    spec = pods["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    services = {each["metadata"]["name"]: each["spec"] for each in found["Service"]}
    labels = pods["spec"]["template"]["metadata"]["labels"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    environment = {each["name"]: each["valueFrom"] for each in container["env"]}

    assert ports == {
        "clients": proxy.port,
        "admin": proxy.admin_port,
        "peers": proxy.peer_port,
    }
    assert proxy.drain_delay_s > 0
    assert spec["terminationGracePeriodSeconds"] > proxy.drain_delay_s + proxy.drain_s
    assert services["kvrs-peers"]["clusterIP"] == "None"
    assert services["kvrs-peers"]["publishNotReadyAddresses"] is True
    assert all(service["selector"].items() <= labels.items() for service in services.values())
    targets = {port["targetPort"] for service in services.values() for port in service["ports"]}
    assert targets <= ports.keys()
    assert "admin" not in targets  # Never open to clients.
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "clients"}
    (budget,) = found["PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] < pods["spec"]["replicas"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pods["spec"]["updateStrategy"]["type"] == "RollingUpdate"
    assert findings_of_restricted(spec) == []
    assert spec["automountServiceAccountToken"] is False
    assert spec["topologySpreadConstraints"]
    assert container["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "clients"}
    optional = {
        name: each["secretKeyRef"].get("optional", False)
        for name, each in environment.items()
        if "secretKeyRef" in each
    }
    assert optional == {
        "KVRS_SECRET": False,
        "KVRS_ADMIN_TOKEN": False,
        "KVRS_KEYS": True,
        "KVRS_VLLM_API_KEY": True,
    }


@pytest.mark.parametrize("unit", sorted(path.name for path in (DEPLOY / "systemd").iterdir()))
def test_units_start_commands_that_exist(unit: str) -> None:
    """They end as long as the proxy drains, and do not start a wrong configuration again."""
    text = (DEPLOY / "systemd" / unit).read_text()

    command = re.search(r"^ExecStart=/opt/kvrs/bin/kvrs (\w+)", text, re.MULTILINE)
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert command is not None
    assert stop is not None
    assert command[1] in ("proxy", "agent")
    assert "RestartPreventExitStatus=2" in text
    if command[1] == "proxy":
        assert int(stop[1]) > Config().proxy.drain_s
        assert "ExecReload=/bin/kill -HUP $MAINPID" in text


def test_a_cluster_of_distserve_goes_with_its_unit() -> None:
    """The file has all ports, one server for each node, and agents; the unit counts epochs by
    itself, and keeps Ray from ending workers for the memory of the whole machine.
    """
    config = load_config(DEPLOY / "distserve" / "kvrs.yaml", ENVIRONMENT)
    unit = (DEPLOY / "distserve" / "kvrs-distserve@.service").read_text()

    assert [*faults_of_proxy(config, ENVIRONMENT)] == []
    assert config.cluster.backend is Backend.DISTSERVE
    assert config.agents_run
    for node in config.cluster.nodes:
        ports = [node.agent.port, node.agent.page_port, node.agent.gossip_port]
        for instance in node.instances:
            ports += [instance.port, instance.page_port]
            assert instance.host == node.agent.host
        assert len({*ports}) == len(ports)
        assert {each.role for each in node.instances} == {Role.PREFILL, Role.DECODE}
    command = re.search(r"^ExecStart=/opt/kvrs/bin/python -m (.+)$", unit, re.MULTILINE)
    assert command is not None
    assert command[1].split() == [
        *("distserve_patches.api_server", "--kvrs-config", "/etc/kvrs/kvrs.yaml"),
        *("--kvrs-node", "%i", "$FLAGS"),
    ]
    assert "RAY_memory_monitor_refresh_ms=0" in unit
    assert "RestartPreventExitStatus=2" in unit


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize(
    ("unit", "exposure"),
    [
        ("systemd/kvrs-proxy.service", 2),
        ("systemd/kvrs-agent@n0.service", 2),
        ("distserve/kvrs-distserve@n0.service", 4),
    ],
)
def test_systemd_accepts_the_units(unit: str, exposure: int, tmp_path: Path) -> None:
    """No unknown key, no wrong value, a small exposure, more of which GPUs' devices need; the
    program itself is replaced by one that is here.
    """
    folder, unit = unit.split("/")
    name = re.sub(r"@\w+", "@", unit)
    text = re.sub(r"/opt/kvrs/bin/\w+", "/bin/true", (DEPLOY / folder / name).read_text())
    (tmp_path / name).write_text(text.replace("User=kvrs\n", ""))

    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    wrong = [line for line in checked.stderr.splitlines() if "kvrs" in line]
    assert wrong == []
    rated = ["systemd-analyze", "security", "--offline=true", "--no-pager"]
    judged = subprocess.run(
        [*rated, f"--threshold={10 * exposure}", str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_servers_with_an_agent_in_their_pod_go_with_their_configuration(tmp_path: Path) -> None:
    """Each pod is a node: its server and its agent have the ids and ports of the file, one user,
    and one /dev/shm, in which the agent's socket is and which outlives the server's container.
    """
    text = (DEPLOY / "kubernetes" / "vllm.yaml").read_text()
    found = {each["kind"]: each for each in yaml.safe_load_all(text)}
    file = tmp_path / "cluster.yaml"
    file.write_text(found["ConfigMap"]["data"]["cluster.yaml"])
    config = load_config(file, ENVIRONMENT)
    pods, service = found["StatefulSet"], found["Service"]
    spec = pods["spec"]["template"]["spec"]
    server, agent = spec["containers"]
    place = tier_of(json.loads(server["args"][1]))["kvrs"]
    ports = {each["name"]: each["containerPort"] for each in [*server["ports"], *agent["ports"]]}
    volumes = {each["name"] for each in spec["volumes"]}

    assert findings_of_restricted(spec) == []
    assert len(config.cluster.nodes) == pods["spec"]["replicas"]
    for number, node in enumerate(config.cluster.nodes):
        (instance,) = node.instances
        host = f"{pods['metadata']['name']}-{number}.{service['metadata']['name']}"
        assert place["instance"].replace("$(POD_INDEX)", str(number)) == instance.id
        assert agent["args"][-1].replace("$(POD_INDEX)", str(number)) == node.id
        assert (instance.host, node.agent.host) == (host, host)
        assert ports == {
            "http": instance.port,
            "agent": node.agent.port,
            "pages": node.agent.page_port,
            "rows": node.agent.row_port,
        }
    assert config.backup.mode is BackupMode.REMOTE
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert {each["port"] for each in service["spec"]["ports"]} >= {ports["agent"], ports["rows"]}
    assert server["command"][-1] == str(ports["http"])
    assert place["config"] == agent["args"][2] == f"/etc/kvrs/{file.name}"
    for container in (server, agent):
        environment = {each["name"]: each["valueFrom"] for each in container["env"]}
        assert "secretKeyRef" in environment["KVRS_SECRET"]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts.keys() == volumes
        assert config.backup.directory == mounts["shm"]
        assert not {"runAsUser", "runAsGroup"} & container["securityContext"].keys()
    assert config.backup.capacity_bytes < size_bytes(agent["resources"]["limits"]["memory"])
    check_memory_of_a_restart(spec, server, more=config.backup.capacity_bytes)


def test_the_image_of_vllm_is_made_of_what_the_build_is_given() -> None:
    """By the user of the agent's image, which its directory is open to."""
    text = (DEPLOY / "kubernetes" / "vllm.Dockerfile").read_text()
    given = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]

    names = [name for names in copied for name in names]
    assert all((DEPLOY.parent / name).exists() for name in names)
    assert {f"!{name}" for name in names} <= {*given}
    assert "USER 10001" in text
    manifests = [(DEPLOY / "kubernetes" / name).read_text() for name in _WITH_VLLM]
    version = re.search(r"^FROM vllm/vllm-openai:v([\d.]+)$", text, re.MULTILINE)
    assert version is not None
    assert all(f"image: vllm-kvrs:{version[1]}\n" in each for each in manifests)
    assert all("runAsUser: 10001" in each for each in manifests)
