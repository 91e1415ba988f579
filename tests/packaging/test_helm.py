"""The chart of `deploy/helm`: its values, its templates, and what helm makes of them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrs import __version__
from kvrs.config.exposure import faults_of_proxy
from kvrs.config.file import Config, checked, load_source, parse_config
from tests.packaging.charts import (
    CHART,
    ENVIRONMENT,
    EXAMPLES,
    PLAIN,
    VALIDATE,
    ChartError,
    by_name,
    example,
    findings_of_restricted,
    found,
    needs_helm,
    rendered,
)

TEMPLATES = sorted((CHART / "templates").iterdir())
# Whole sections that a template prints as they are, or that are a document of kvrs.
WHOLE = (
    *("config", "resources", "podAnnotations", "nodeSelector", "tolerations", "affinity"),
    *("podSecurityContext", "securityContext", "model.volume", "serviceAccount.annotations"),
    *("service.annotations", "probes.startup", "probes.readiness", "probes.liveness"),
    *("podLabels", "lifecycle", "networkPolicy", "podMonitor", "prometheusRule"),
    "dashboard",
)


def values() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return document


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
    # A variable for a section, which the templates read through.
    text = text.replace("$image.", ".Values.image.")
    return set(re.findall(r"\.Values\.([A-Za-z0-9_.]*[A-Za-z0-9_])", text))


def config_in(manifests: dict[tuple[str, str], Any], directory: Path, pod: str) -> Config:
    """The configuration of one pod, as its proxy reads it."""
    path = directory / "kvrs.yaml"
    path.write_text(manifests["ConfigMap", "east"]["data"]["kvrs.yaml"])
    return checked(load_source(path, ENVIRONMENT | {"KVRS_POD": pod}))


def test_templates_use_values_that_exist_and_all_of_them() -> None:
    """A value that no template uses would do nothing; one that does not exist prints nothing."""
    document = values()

    for path in used():
        section: Any = document
        for key in path.split("."):
            assert key in section, path
            section = section[key]
            if path.startswith("config"):  # A document of kvrs, whose keys have defaults.
                break
    assert {*paths_of(document)} <= used() | {path.rpartition(".")[0] for path in used()}
    text = "".join(path.read_text() for path in TEMPLATES)
    for name in ("networkPolicy", "podMonitor", "prometheusRule", "dashboard"):
        for key in document[name]:
            assert re.search(rf"[.$a-zA-Z ]\.{key}\b", text), f"{name}.{key}"


def test_the_schema_has_each_value_and_no_other() -> None:
    """Helm refuses a value that is not in it, so one that is missing there could not be set. The
    chart has few of the settings below `config` (`tests/config/test_reference.py`).
    """

    def compare(section: dict[str, Any], schema: dict[str, Any], key: str = "") -> None:
        if key != "config" and (known := schema.get("properties")) is not None:
            assert schema["additionalProperties"] is False
            assert section.keys() == known.keys() - {"global"}  # Of a chart above this one.
            for key, value in section.items():
                compare(value, known[key], key)

    compare(values(), json.loads((CHART / "values.schema.json").read_text()))


@pytest.mark.process
@needs_helm
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"networkpolicy": {"enabled": True}}, "networkpolicy"),
        ({"networkPolicy": {"enable": True}}, "enable"),
        ({"podMonitor": {"enabled": "yes"}}, "/podMonitor/enabled"),
        ({"image": {"digest": "0.1.0"}}, "/image/digest"),
        ({"replicas": "two"}, "/replicas"),
        ({"config": {"proxy": {"wokers": 2}}}, "wokers"),
        ({"config": {"policy": {"name": "foo"}}}, "always_migrate"),
        ({"config": {"proxy": {"workers": 99}}}, "/config/proxy/workers"),
        ({"model": {"claim": "model"}}, "claim"),
        ({"model": {"volume": {}}}, "set model.volume, or initContainers"),
    ],
)
def test_a_value_that_would_do_nothing_is_refused(wrong: dict[str, Any], named: str) -> None:
    """By its name. A misspelt `networkPolicy` would leave the ports open."""
    with pytest.raises(ChartError, match=named):
        rendered(PLAIN | wrong)


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
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.mark.process
@needs_helm
@pytest.mark.parametrize("name", EXAMPLES)
def test_pods_are_restricted_and_guarded(name: str, tmp_path: Path) -> None:
    """By the standard `restricted`, without a token of the cluster, on different machines, with
    time to drain, and probes of the ports that the configuration has.
    """
    manifests = found(example(name))
    pods = manifests["StatefulSet", "east"]["spec"]
    spec, config = pods["template"]["spec"], config_in(manifests, tmp_path, "east-0")
    (container,) = spec["containers"]
    proxy, labels = config.proxy, pods["template"]["metadata"]["labels"].items()

    assert findings_of_restricted(spec) == []
    has_labels = any(one.pods for one in config.cluster.services)
    assert spec["automountServiceAccountToken"] is has_labels
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    spread = {each["topologyKey"]: each for each in spec["topologySpreadConstraints"]}
    assert spread["kubernetes.io/hostname"]["whenUnsatisfiable"] == "DoNotSchedule"
    assert spec["affinity"]["podAntiAffinity"]
    assert spec["terminationGracePeriodSeconds"] > proxy.drain_delay_s + proxy.drain_s
    assert proxy.drain_delay_s > 0
    assert pods["podManagementPolicy"] == "OrderedReady"  # No two drain at the same time.
    probes = {key: container[key]["httpGet"]["path"] for key in container if "Probe" in key}
    assert probes == {
        "startupProbe": "/healthz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    admin = [port for name, port in ports.items() if name.startswith("admin")]
    assert (ports["clients"], ports["peers"]) == (proxy.port, proxy.peer_port)
    assert admin == [*proxy.ports_of("admin_port")]
    environment = {each["name"] for each in container["env"]}
    assert {"KVRS_SECRET", "KVRS_ADMIN_TOKEN", "KVRS_KEYS", "KVRS_VLLM_API_KEY"} <= environment
    selectors = [pods["selector"]["matchLabels"]]
    selectors += [
        each["spec"]["selector"] for (kind, _), each in manifests.items() if kind == "Service"
    ]
    selectors.append(manifests["PodDisruptionBudget", "east"]["spec"]["selector"]["matchLabels"])
    assert all(selector.items() <= labels for selector in selectors)
    assert "app.kubernetes.io/version" not in pods["selector"]["matchLabels"]  # It may change.


@pytest.mark.process
@needs_helm
@pytest.mark.parametrize("name", EXAMPLES)
def test_one_file_serves_each_pod(name: str, tmp_path: Path) -> None:
    """With its own id and the others as peers."""
    manifests = found(example(name))
    replicas = manifests["StatefulSet", "east"]["spec"]["replicas"]

    for number in range(replicas):
        pod = f"east-{number}"
        service = manifests["Service", "east-peers"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        config = config_in(manifests, tmp_path, pod)
        assert config.proxy.id == pod
        others = config.proxy.peers
        wanted = {f"east-{other}" for other in range(replicas)} - {pod}
        assert wanted == {one.id for one in others}
        assert {one.host for one in others} == {f"{one.id}.east-peers" for one in others}
        full = f"{pod}.east-peers.prod.svc.cluster.local"
        assert {f"{pod}.east-peers", full} <= {*config.security.hosts}
        assert [*faults_of_proxy(config, ENVIRONMENT)] == []


@pytest.mark.process
@needs_helm
@pytest.mark.parametrize("name", EXAMPLES)
def test_rendered_files_pass_the_check_of_kvrs(name: str, tmp_path: Path) -> None:
    """`kvrs config check`, with the directory of a model in place of the volume."""
    model = tmp_path / "model"
    model.mkdir()
    geometry = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(geometry | {"vocab_size": 9}))
    text = found(example(name))["ConfigMap", "east"]["data"]["kvrs.yaml"]
    path = tmp_path / "kvrs.yaml"
    path.write_text(text.replace("/models/model", str(model)))

    checked = subprocess.run(
        [sys.executable, "-m", "kvrs", "config", "check", str(path)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert checked.returncode == 0, checked.stderr
    assert "is valid" in checked.stderr


@pytest.mark.process
@needs_helm
def test_values_of_operators_reach_the_manifests() -> None:
    """Image by digest, secrets, environment, priority, labels, volumes and names of hosts."""
    own = example("guarded-values.yaml")
    manifests = found(own)
    pods = manifests["StatefulSet", "east"]["spec"]["template"]
    spec, (container,) = pods["spec"], pods["spec"]["containers"]

    assert container["image"] == f"registry.example/kvrs@{own['image']['digest']}"
    assert spec["imagePullSecrets"] == own["imagePullSecrets"]
    assert container["env"][-1:] == own["extraEnv"]
    assert container["envFrom"] == own["envFrom"]
    assert container["lifecycle"] == own["lifecycle"]
    assert spec["priorityClassName"] == own["priorityClassName"]
    assert (spec["nodeSelector"], spec["tolerations"]) == (own["nodeSelector"], own["tolerations"])
    assert pods["metadata"]["labels"]["team"] == "serving"
    assert pods["metadata"]["annotations"] == own["podAnnotations"]
    assert spec["volumes"][-1:] == own["extraVolumes"]
    assert container["volumeMounts"][-1:] == own["extraVolumeMounts"]
    text = manifests["ConfigMap", "east"]["data"]["kvrs.yaml"]
    assert "kvrs-admin" in yaml.safe_load(text)["security"]["hosts"]
    plain = found(PLAIN)["StatefulSet", "east"]["spec"]["template"]["spec"]["containers"][0]
    assert plain["image"] == f"kvrs:{__version__}"


@pytest.mark.process
@needs_helm
def test_the_model_comes_from_any_volume_or_from_an_init_container() -> None:
    """The proxies only read it; what the init container fetches goes to a volume of the pod."""
    one = example("one-values.yaml")
    for own, source in (
        (PLAIN, PLAIN["model"]["volume"]),
        (example("guarded-values.yaml"), example("guarded-values.yaml")["model"]["volume"]),
        (one, {"emptyDir": {}}),
    ):
        spec = found(own)["StatefulSet", "east"]["spec"]["template"]["spec"]

        assert {"name": "model", **source} in spec["volumes"]
        (mount,) = (
            each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "model"
        )
        assert mount == {"name": "model", "mountPath": "/models/model", "readOnly": True}
        assert spec.get("initContainers", []) == own.get("initContainers", [])


@pytest.mark.process
@needs_helm
def test_names_accounts_and_security_contexts_are_the_operators() -> None:
    """One name for all objects; an account with annotations has no rights; null removes a key."""
    own = example("guarded-values.yaml")
    manifests = found(own | {"fullnameOverride": "gate"})
    pods = manifests["StatefulSet", "gate"]["spec"]
    spec = pods["template"]["spec"]

    assert {name.partition("-")[0] for _, name in manifests} == {"gate"}
    assert pods["serviceName"] == "gate-peers"
    document = yaml.safe_load(manifests["ConfigMap", "gate"]["data"]["kvrs.yaml"])
    assert [peer["host"] for peer in document["proxy"]["peers"]] == [
        f"gate-{number}.gate-peers" for number in range(3)
    ]
    account = manifests["ServiceAccount", "gate"]["metadata"]
    assert account["annotations"] == own["serviceAccount"]["annotations"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("gate", False)
    assert not any("Role" in kind for kind, _ in manifests)
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.process
@needs_helm
def test_the_network_is_closed_but_for_what_is_named() -> None:
    """The peer port is open to proxies only, the admin port to whom the values name, or no one."""
    own = example("guarded-values.yaml")
    rules = found(own)["NetworkPolicy", "east"]["spec"]["ingress"]
    elastic = found(example("elastic-values.yaml"))["NetworkPolicy", "east"]["spec"]["ingress"]

    by_port = {rule["ports"][0]["port"]: rule for rule in rules}
    assert by_port[8000]["from"] == own["networkPolicy"]["clients"]
    assert by_port[8001]["from"] == own["networkPolicy"]["operators"]
    (peers,) = by_port[8002]["from"]
    assert peers["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "east"
    of_elastic = {rule["ports"][0]["port"]: rule["ports"] for rule in elastic}
    assert of_elastic.keys() == {8000, 8002, 7946}  # No operator is named: the admin port is shut.
    assert [each["endPort"] for each in of_elastic[7946]] == [7949]
    assert of_elastic[8002][0]["endPort"] == 8005


@pytest.mark.process
@needs_helm
def test_prometheus_and_grafana_get_the_rules_and_the_dashboard() -> None:
    """Every worker is scraped with the token; alerts find `kvrs` in the job's name."""
    own = example("guarded-values.yaml")
    manifests = found(own)

    monitor = manifests["PodMonitor", "east-kvrs"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "kvrs", "key": "admin-token"}
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", own["podMonitor"]["tlsConfig"])
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    rules = (CHART / "files" / "alerts.yaml").read_text()
    linked = rules.replace("runbook: kvrs docs runbooks#", "runbook_url: https://docs.example/#")
    assert manifests["PrometheusRule", "east"]["spec"] == yaml.safe_load(linked)
    plain = found(example("machines-values.yaml"))["PrometheusRule", "east"]["spec"]
    assert plain == yaml.safe_load(rules)
    (text,) = manifests["ConfigMap", "east-dashboard"]["data"].values()
    assert json.loads(text) == json.loads((CHART / "files" / "dashboard.json").read_text())
    elastic = found(example("elastic-values.yaml"))["PodMonitor", "east-kvrs"]["spec"]
    ports = [each["port"] for each in elastic["podMetricsEndpoints"]]
    assert ports == ["admin", "admin-1", "admin-2", "admin-3"]


@pytest.mark.process
@needs_helm
def test_more_processes_than_peers_may_be_are_refused() -> None:
    with pytest.raises(ChartError, match="9 proxies of 4 workers; allowed: 32 processes in all"):
        rendered(PLAIN | {"replicas": 9, "config": {"proxy": {"workers": 4}}})


@pytest.mark.process
@needs_helm
def test_proxies_may_list_the_pods_of_their_services_and_nothing_else() -> None:
    """In the namespaces that the services name, and only where one has pods."""
    manifests = found(example("labelled-values.yaml"))

    roles = [each for (kind, _), each in manifests.items() if kind == "Role"]
    assert [each["metadata"]["namespace"] for each in roles] == ["engines"]
    assert roles[0]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    (subject,) = manifests["RoleBinding", "east-pods"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "east", "namespace": "prod"}
    assert ("ServiceAccount", "east") in manifests
    role = manifests["ClusterRole", "prod-east-nodes"]  # One service follows nodes.
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert manifests["ClusterRoleBinding", "prod-east-nodes"]["subjects"] == [subject]
    assert not any("Role" in kind or "Account" in kind for kind, _ in found(PLAIN))


@pytest.mark.process
@needs_helm
@pytest.mark.parametrize(("ipv6", "host"), [(True, "::"), (False, "0.0.0.0")])
def test_pods_of_ipv6_alone_listen_there(ipv6: bool, host: str) -> None:
    made = found(PLAIN | {"ipv6": ipv6})["ConfigMap", "east"]

    proxy = yaml.safe_load(made["data"]["kvrs.yaml"])["proxy"]
    assert {proxy[key] for key in ("host", "admin_host", "peer_host")} == {host}


@pytest.mark.process
@needs_helm
def test_helm_keeps_values_as_they_are(tmp_path: Path) -> None:
    """Large numbers above all, which it reads as floating-point ones."""
    proxy = {"mirror_bytes": 268435456, "body_budget_bytes": 10737418240, "token_gap_s": 7.5}
    own = {"config": {"proxy": proxy, "transfer": {"link_bytes_per_s": 3.125e9}}}

    config = config_in(found(PLAIN | own), tmp_path, "east-1")

    assert {key: getattr(config.proxy, key) for key in proxy} == proxy
    assert config.transfer.link_bytes_per_s == 3.125e9


@pytest.mark.process
@needs_helm
def test_the_plain_manifest_is_what_helm_renders() -> None:
    """`make manifests` writes it: for those without helm."""
    plain = CHART.parent / "kubernetes" / "kvrs.yaml"

    made = re.sub(r"\beast\b", "kvrs", rendered(PLAIN, "default"))

    assert by_name(plain.read_text()) == by_name(made)


@pytest.mark.process
@needs_helm
@pytest.mark.skipif(VALIDATE is None, reason="no kubernetes-validate here")
@pytest.mark.parametrize("name", [*EXAMPLES, "machines.yaml", "vllm.yaml"])
def test_manifests_follow_the_schemas_of_kubernetes(name: str, tmp_path: Path) -> None:
    """No unknown key either. Kinds of the Prometheus operator have no schema there."""
    path = tmp_path / "rendered.yaml"
    plain = CHART.parent / "kubernetes" / name
    path.write_text(plain.read_text() if plain.exists() else rendered(example(name)))

    assert VALIDATE is not None
    checked = subprocess.run(
        [VALIDATE, "--strict", str(path)], capture_output=True, text=True, check=False, timeout=60
    )

    said = checked.stdout + checked.stderr
    assert checked.returncode == 0, said
    without = len(re.findall("Couldn't find schema for kind (?:PodMonitor|PrometheusRule) ", said))
    assert said.count(" passed ") + without == len(by_name(path.read_text()))
