"""The examples from end to end in `deploy/`: their parts go with each other and with kvrs."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrs.config.exposure import faults_of_proxy
from kvrs.config.file import Config, load_config
from kvrs.protocol.instance import Role
from tests.packaging.charts import CHART, ENVIRONMENT, findings_of_restricted

DEPLOY = CHART.parent
COMPOSE = DEPLOY / "compose"
MACHINES = {
    (each["kind"], each["metadata"]["name"]): each
    for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "machines.yaml").read_text())
}


def of_machines(directory: Path) -> Config:
    path = directory / "cluster.yaml"
    path.write_text(MACHINES["ConfigMap", "kvrs-cluster"]["data"]["cluster.yaml"])
    return load_config(path, ENVIRONMENT)


def pod_of(name: str) -> Any:
    return MACHINES["DaemonSet", name]["spec"]["template"]["spec"]


def test_proxies_of_the_chart_have_the_cluster_of_the_machines() -> None:
    """Both files name it, since the chart has no engines."""
    text = MACHINES["ConfigMap", "kvrs-cluster"]["data"]["cluster.yaml"]
    values = yaml.safe_load((CHART / "ci" / "machines-values.yaml").read_text())["config"]

    assert yaml.safe_load(text) == values


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_servers_on_machines_go_with_their_file(role: Role, tmp_path: Path) -> None:
    """NIXL's connector and that of kvrs, at the ports and under the ids of the file; ids are names
    of machines, so that a pod knows its own.
    """
    config = of_machines(tmp_path)
    spec = pod_of(f"vllm-{role.value}")
    (server,) = spec["containers"]
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    transfer = json.loads(server["args"][1])
    nixl, kvrs = transfer["kv_connector_extra_config"]["connectors"]

    assert spec["nodeSelector"] == {"kvrs.io/role": role.value}
    assert spec["hostNetwork"] is True
    assert transfer["kv_connector"] == "MultiConnector"
    wanted = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}[role]
    assert (nixl["kv_connector"], nixl["kv_role"]) == ("NixlConnector", wanted)
    assert kvrs["kv_connector_module_path"] == "kvrs.vllm.connector"
    place = kvrs["kv_connector_extra_config"]["kvrs"]
    assert place == {"config": "/etc/kvrs/cluster.yaml", "instance": "$(NODE_NAME)"}
    for node, instance in config.cluster.instances():
        assert str(node.id) == str(instance.id)
        assert instance.host == node.agent.host
        assert (instance.port, instance.connector_port) == (ports["http"], ports["connector"])
    assert {each["name"] for each in server["volumeMounts"]} == {
        each["name"] for each in spec["volumes"]
    }
    environment = {each["name"] for each in server["env"]}
    assert {"NODE_NAME", "KVRS_SECRET", "VLLM_NIXL_SIDE_CHANNEL_HOST"} <= environment
    assert server["command"][-1] == str(ports["http"])


def test_agents_on_machines_have_room_for_what_they_keep(tmp_path: Path) -> None:
    """They are restricted but for the network of the machine, and outlive the servers there."""
    config = of_machines(tmp_path)
    spec = pod_of("kvrs-agent")
    (agent,) = spec["containers"]
    ports = {each["name"]: each["containerPort"] for each in agent["ports"]}
    (shm,) = (each["emptyDir"] for each in spec["volumes"] if each["name"] == "shm")

    assert findings_of_restricted(spec) == ["hostNetwork"]
    assert agent["args"][-2:] == ["--node", "$(NODE_NAME)"]
    assert all(
        (node.agent.port, node.agent.page_port) == (ports["agent"], ports["pages"])
        for node in config.cluster.nodes
    )
    limit = int(agent["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    room = int(shm["sizeLimit"].removesuffix("Gi")) << 30
    assert config.backup.capacity_bytes < room < limit
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
        transfer = json.loads(server["command"][1])
        place = transfer["kv_connector_extra_config"]["kvrs"]
        assert place == {"config": "/etc/kvrs/kvrs.yaml", "instance": instance.id}
        assert agent["command"][-1] == node.id
        room = int(agent["shm_size"].removesuffix("gb")) << 30
        assert config.backup.capacity_bytes < room
    dockerfile = (COMPOSE / "vllm.Dockerfile").read_text()
    assert f'"--port", "{instance.port}"' in dockerfile
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
