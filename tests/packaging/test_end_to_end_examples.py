"""The examples from end to end in `deploy/`: their parts go with each other and with kvrs."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrs.config.backup import BackupMode
from kvrs.config.exposure import faults_of_proxy
from kvrs.config.file import Config, load_config
from kvrs.protocol.instance import Role
from tests.packaging.charts import (
    CHART,
    ENVIRONMENT,
    check_memory_of_a_restart,
    findings_of_restricted,
    size_bytes,
    tier_of,
)

DEPLOY = CHART.parent
COMPOSE = DEPLOY / "compose"
MACHINES = {
    (each["kind"], each["metadata"]["name"]): each
    for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "machines.yaml").read_text())
}


def of_machines(directory: Path) -> Config:
    path = directory / "cluster.yaml"
    path.write_text(MACHINES["ConfigMap", "kvrs-cluster"]["data"]["cluster.yaml"])
    return load_config(path, ENVIRONMENT | {"HOST_IP": "10.0.0.10"})


def pod_of(name: str) -> Any:
    return MACHINES["StatefulSet", name]["spec"]["template"]["spec"]


def pods_of(name: str) -> dict[str, int]:
    """The pods of a StatefulSet by the names that the headless service gives them, with the number
    that each has in its label.
    """
    spec, service = MACHINES["StatefulSet", name]["spec"], MACHINES["Service", "engines"]
    assert spec["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    first = spec.get("ordinals", {}).get("start", 0)
    return {f"{name}-{at}.engines": at for at in range(first, first + spec["replicas"])}


def test_proxies_of_the_chart_have_the_cluster_of_the_machines() -> None:
    """Both files name it, since the chart has no engines. The agents alone have a directory, and
    addresses where their ports listen.
    """
    document = yaml.safe_load(MACHINES["ConfigMap", "kvrs-cluster"]["data"]["cluster.yaml"])
    values = yaml.safe_load((CHART / "ci" / "machines-values.yaml").read_text())["config"]

    del document["backup"]["directory"]
    for node in document["cluster"]["nodes"]:
        del node["agent"]["bind"]
    assert document == values


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_servers_on_machines_go_with_their_file(role: Role, tmp_path: Path) -> None:
    """NIXL's connector and vLLM's CPU tier with kvrs in it, at the ports and under the ids of the
    file, which are names of pods. A server is on the machine of its node's agent.
    """
    config = of_machines(tmp_path)
    spec = pod_of(f"vllm-{role.value}")
    (server,) = spec["containers"]
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    transfer = json.loads(server["args"][1])
    nixl, _ = transfer["kv_connector_extra_config"]["connectors"]

    (beside,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    agents = MACHINES["StatefulSet", "kvrs-agent"]["spec"]["selector"]
    assert beside == {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": agents,
        "matchLabelKeys": ["apps.kubernetes.io/pod-index"],
    }
    assert spec["hostNetwork"] is True
    wanted = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}[role]
    assert nixl["kv_role"] == wanted
    place = tier_of(transfer)["kvrs"]
    assert place == {"config": "/etc/kvrs/cluster.yaml", "instance": "$(POD_NAME)"}
    named = {
        instance.host: int(str(node.id).removeprefix("n"))
        for node, instance in config.cluster.instances()
        if instance.role is role
    }
    assert named == pods_of(f"vllm-{role.value}")
    for _, instance in config.cluster.instances():
        assert str(instance.host) == f"{instance.id}.engines"
        assert instance.port == ports["http"]
    assert {each["name"] for each in server["volumeMounts"]} == {
        each["name"] for each in spec["volumes"]
    }
    environment = {each["name"] for each in server["env"]}
    assert {"POD_NAME", "HOST_IP", "KVRS_SECRET", "VLLM_NIXL_SIDE_CHANNEL_HOST"} <= environment
    assert server["command"][-1] == str(ports["http"])
    check_memory_of_a_restart(spec, server)


def sockets_of(spec: dict[str, Any]) -> dict[str, Any]:
    """The directory of the machine in which the agent listens, as a pod has it."""
    ((name, host),) = (
        (each["name"], each["hostPath"]) for each in spec["volumes"] if "hostPath" in each
    )
    assert host["type"] == "DirectoryOrCreate"
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    mounts = {
        each["mountPath"]
        for one in containers
        for each in one["volumeMounts"]
        if each["name"] == name
    }
    assert len(mounts) == 1
    return {
        "host": host["path"],
        "mount": mounts.pop(),
        "user": spec["securityContext"]["runAsUser"],
    }


def test_agents_on_machines_outlive_servers_and_their_pods(tmp_path: Path) -> None:
    """A directory of the machine has the socket over which servers, as the same user, pass their
    memory. Beside it and the machine's network all pods are restricted, but for the container that
    gives the directory to this user.
    """
    config = of_machines(tmp_path)
    pods = [pod_of(name) for name in ("kvrs-agent", "vllm-prefill", "vllm-decode")]
    (agent,) = pods[0]["containers"]
    (directory,) = pods[0]["initContainers"]
    ports = {each["name"]: each["containerPort"] for each in agent["ports"]}
    shared = ["hostNetwork", "volume sockets: {'hostPath'}"]

    places = [sockets_of(spec) for spec in pods]
    assert places == [places[0]] * 3
    assert places[0]["mount"] == config.backup.directory
    of_root = ["directory: runAsNonRoot", "directory: runAsUser", "directory: capabilities.add"]
    assert [findings_of_restricted(spec) for spec in pods] == [shared + of_root, shared, shared]
    # Also where no admission plug-in adds it: machines with GPUs have a taint, agents ask for none.
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert [spec["tolerations"] for spec in pods] == [tolerations] * 3
    user = places[0]["user"]
    assert directory["command"] == ["chown", f"{user}:{user}", places[0]["mount"]]
    assert agent["args"][-2:] == ["--node", "n$(POD_INDEX)"]
    assert {"POD_INDEX", "HOST_IP"} <= {each["name"] for each in agent["env"]}
    hosts = {str(node.agent.host): f"n{at}" for at, node in enumerate(config.cluster.nodes)}
    assert hosts == {host: f"n{at}" for host, at in pods_of("kvrs-agent").items()}
    assert [str(node.id) for node in config.cluster.nodes] == [*hosts.values()]
    assert all(
        (node.agent.port, node.agent.page_port, node.agent.row_port)
        == (ports["agent"], ports["pages"], ports["rows"])
        for node in config.cluster.nodes
    )
    assert config.backup.mode is BackupMode.REMOTE
    assert config.backup.capacity_bytes < size_bytes(agent["resources"]["limits"]["memory"])
    assert not [*faults_of_proxy(config, ENVIRONMENT)]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return found


def test_containers_of_compose_have_the_names_and_ports_of_their_file() -> None:
    """One file for all of them, which can run; each command has its own id in it."""
    services = compose()["services"]
    config = load_config(COMPOSE / "kvrs.yaml", ENVIRONMENT)

    for node, instance in config.cluster.instances():
        server, agent = services[instance.host], services[node.agent.host]
        tier = tier_of(json.loads(server["command"][1]))
        assert tier["kvrs"] == {"config": "/etc/kvrs/kvrs.yaml", "instance": instance.id}
        assert agent["command"][-1] == node.id
        assert tier["cpu_bytes_to_use"] < int(server["shm_size"].removesuffix("gb")) << 30
        for each in (server, agent):
            assert f"sockets:{config.backup.directory}" in each["volumes"]
    dockerfile = (COMPOSE / "vllm.Dockerfile").read_text()
    assert f'"--port", "{instance.port}"' in dockerfile
    copies = f"kvrs_testkit/{tier['spec_module_path']}.py"
    assert f"COPY {copies} /opt/copies/\n" in dockerfile
    assert "PYTHONPATH=/opt/copies " in dockerfile
    assert f"class {tier['spec_name']}(" in (COMPOSE / "../.." / copies).read_text()
    given = compose()["volumes"]["sockets"]["driver_opts"]["o"].split(",")
    users = {
        each.removeprefix("USER ")
        for path in (COMPOSE / "vllm.Dockerfile", DEPLOY / "Dockerfile")
        for each in path.read_text().splitlines()
        if each.startswith("USER ")
    }
    assert {f"uid={user}" for user in users} == {given[0]}
    assert (
        config.backup.capacity_bytes < int(given[1].removeprefix("size=").removesuffix("m")) << 20
    )
    assert [*faults_of_proxy(config, ENVIRONMENT)] == []
    published = [port for each in services.values() for port in each.get("ports", [])]
    assert published == ["127.0.0.1:8000:8000", "127.0.0.1:9090:9090"]
    (target,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    host, _, port = target["static_configs"][0]["targets"][0].partition(":")
    assert host in services
    assert host in config.security.hosts
    assert int(port) == config.proxy.admin_port


def test_files_that_compose_names_exist() -> None:
    """Mounted ones, and those that its images are made of."""
    document = compose()
    services = document["services"].values()

    for mount in (mount for each in services for mount in each.get("volumes", [])):
        if mount.startswith("."):
            assert (COMPOSE / mount.partition(":")[0]).exists(), mount
    for each in services:
        if (build := each.get("build")) is not None:
            dockerfile = COMPOSE / build["context"] / build["dockerfile"]
            copies = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile.read_text(), re.MULTILINE)
            assert all(
                (COMPOSE / "../.." / name).exists() for line in copies for name in line.split()
            )


def compose_program() -> list[str]:
    """Docker's plugin, or the older program."""
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") and not subprocess.run(asked, capture_output=True).returncode:
        return asked[:2]
    if shutil.which("docker-compose") is None:
        pytest.skip("neither docker compose nor docker-compose here")
    return ["docker-compose"]


@pytest.mark.process
def test_compose_accepts_its_file() -> None:
    """No unknown key, no wrong value; nothing is started."""
    checked = subprocess.run(
        [*compose_program(), "config", "--quiet"],
        cwd=COMPOSE,
        env={"MODEL": "/tmp", "PATH": "/usr/local/bin:/usr/bin:/bin", **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert checked.returncode == 0, checked.stderr
