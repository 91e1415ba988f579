"""The chart of `deploy/helm`: its values, its templates, and what helm makes of them."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrs.config.exposure import faults_of_proxy
from kvrs.config.file import load_config, parse_config

CHART = Path(__file__).parents[2] / "deploy" / "helm"
TEMPLATES = sorted((CHART / "templates").iterdir())
ENVIRONMENT = {"KVRS_SECRET": "x" * 32, "KVRS_ADMIN_TOKEN": "y" * 32}
# Whole sections that a template prints as they are, or that are a document of kvrs.
WHOLE = (
    *("config", "resources", "podAnnotations", "nodeSelector", "tolerations", "affinity"),
    *("service.annotations", "probes.readiness", "probes.liveness"),
)
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm here")


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def paths_of(section: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in section.items():
        path = above + key
        if isinstance(value, dict) and path not in WHOLE:
            yield from paths_of(value, f"{path}.")
        else:
            yield path


def used() -> set[str]:
    """The paths below `.Values` in all templates."""
    text = "".join(path.read_text() for path in TEMPLATES)
    return set(re.findall(r"\.Values\.([A-Za-z0-9_.]+)", text))


def test_templates_use_values_that_exist_and_all_of_them() -> None:
    """A value that no template uses would do nothing; one that does not exist prints nothing."""
    document = values()

    for path in used():
        section: Any = document
        for key in path.split("."):
            assert key in section, path
            section = section[key]
    assert {*paths_of(document)} <= used()


def test_actions_and_definitions_of_templates_are_closed() -> None:
    """A check without helm: each block has its end, each include its definition."""
    texts = {path.name: path.read_text() for path in TEMPLATES}
    whole = "".join(texts.values())

    for name, text in texts.items():
        actions = re.findall(r"\{\{-? *(.*?) *-?\}\}", text)
        assert text.count("{{") == len(actions), name
        opened = sum(
            re.match(r"(if|range|with|define)\b", action) is not None for action in actions
        )
        assert opened == actions.count("end"), name
    includes = set(re.findall(r'include "([\w.]+)"', whole))
    assert includes == set(re.findall(r'define "([\w.]+)"', whole))


def test_the_configuration_of_the_values_can_run() -> None:
    """The image, too, is the one that deploy/Dockerfile makes, with the paths that it has."""
    document = values()

    config = parse_config(document["config"])

    assert config.cluster.model == document["model"]["path"]
    assert [*faults_of_proxy(config, {})] == []
    assert document["disruptionBudget"]["minAvailable"] < document["replicas"]


def rendered(own: dict[str, Any], directory: Path) -> str:
    """The manifests that helm makes of the chart with these values."""
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(own))
    command = ["helm", "template", "east", str(CHART), "--values", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
@needs_helm
def test_helm_renders_manifests_whose_configurations_can_run(tmp_path: Path) -> None:
    """Each pod has a file with its own id and the others as peers, by the headless service."""
    subprocess.run(["helm", "lint", str(CHART)], capture_output=True, check=True, timeout=60)

    found: dict[str, dict[str, Any]] = {}
    for each in yaml.safe_load_all(rendered({"replicas": 3}, tmp_path)):
        found.setdefault(each["kind"], {})[each["metadata"]["name"]] = each
    pods = found["StatefulSet"]["east"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    files = found["ConfigMap"]["east"]["data"]
    labels = pods["template"]["metadata"]["labels"].items()
    names = [f"east-{number}" for number in range(3)]
    assert [*files] == [f"{name}.yaml" for name in names]
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(text)
        proxy = (config := load_config(path, ENVIRONMENT)).proxy
        others = [other for other in names if other != path.stem]
        assert proxy.id == path.stem
        assert [peer.id for peer in proxy.peers] == others
        assert [peer.host for peer in proxy.peers] == [
            f"{other}.{pods['serviceName']}" for other in others
        ]
        assert {peer.host for peer in proxy.peers} <= {*config.security.hosts}
        assert [*faults_of_proxy(config, ENVIRONMENT)] == []
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {"clients": proxy.port, "admin": proxy.admin_port, "peers": proxy.peer_port}
        assert proxy.drain_delay_s > 0
        grace_s = pods["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > proxy.drain_delay_s + proxy.drain_s
    assert {*found["Service"]} == {"east", "east-peers"}
    assert all(each["spec"]["selector"].items() <= labels for each in found["Service"].values())
    assert pods["selector"]["matchLabels"].items() <= labels
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "clients"}


def test_peers_of_the_chart_have_the_workers_of_the_values() -> None:
    """All pods have the same number of workers, and it is passed on, as far as a test without helm
    shows.
    """
    text = (CHART / "templates" / "_helpers.tpl").read_text()

    (peer,) = re.findall(r'\(dict "id".*?\) }}', text)
    assert '"workers" $workers' in peer
    assert "$workers := int ((.root.Values.config.proxy).workers | default 1)" in text


@pytest.mark.process
@needs_helm
def test_helm_renders_peers_with_the_workers_of_the_values(tmp_path: Path) -> None:
    """Else no proxy of the chart could reach another one."""
    made = rendered({"config": {"proxy": {"workers": 4}}}, tmp_path)

    for each in yaml.safe_load_all(made):
        for text in each["data"].values() if each["kind"] == "ConfigMap" else ():
            config = parse_config(yaml.safe_load(text))
            assert [peer.workers for peer in config.proxy.peers] == [4]
            assert [*faults_of_proxy(config, ENVIRONMENT)] == []


@pytest.mark.process
@needs_helm
def test_helm_keeps_values_as_they_are(tmp_path: Path) -> None:
    """Large numbers above all, which it reads as floating-point ones; and other volumes."""
    volume = {"name": "tls", "secret": {"secretName": "certificates"}}
    mount = {"name": "tls", "mountPath": "/etc/kvrs-tls", "readOnly": True}
    proxy = {"mirror_bytes": 268435456, "event_log_bytes": 10737418240, "keep_alive_s": 7.5}
    own = {
        "replicas": 1,
        "config": {"proxy": proxy, "transfer": {"link_bytes_per_s": 3.125e9}},
        "extraVolumes": [volume],
        "extraVolumeMounts": [mount],
    }

    found = {each["kind"]: each for each in yaml.safe_load_all(rendered(own, tmp_path))}

    (text,) = found["ConfigMap"]["data"].values()
    config = parse_config(yaml.safe_load(text))
    spec = found["StatefulSet"]["spec"]["template"]["spec"]
    assert {key: getattr(config.proxy, key) for key in proxy} == proxy
    assert config.transfer.link_bytes_per_s == 3.125e9
    assert config.proxy.peers == []
    assert spec["volumes"][-1] == volume
    assert spec["containers"][0]["volumeMounts"][-1] == mount


@pytest.mark.process
@needs_helm
@pytest.mark.skipif(shutil.which("kubernetes-validate") is None, reason="no kubernetes-validate")
def test_manifests_follow_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    """Those that helm renders, and those without it; no unknown key either."""
    made = tmp_path / "rendered.yaml"
    made.write_text(rendered({}, tmp_path))
    plain = CHART.parent / "kubernetes" / "kvrs.yaml"

    checked = subprocess.run(
        ["kubernetes-validate", "--strict", str(made), str(plain)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    said = checked.stdout + checked.stderr
    assert checked.returncode == 0, said
    assert said.count(" passed ") == 10
