"""The chart and the manifests of deploy/ at an API server of Kubernetes, with controllers and a
scheduler.

KUBECONFIG names a cluster without machines. The program adds some, and tells the API server what
their kubelets would: pods that were scheduled run, and those that are to end do.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.command_line import parser_of
from experiments.record import ROOT, Record
from kvrs.config.cluster import ServiceSettings
from kvrs.protocol.instance import Role
from kvrs.proxy.fleet.discovery import PodsUnknownError, pod_addresses

MANIFESTS = ROOT / "deploy" / "kubernetes"
CLUSTER_KINDS = ("Namespace", "Node", "PersistentVolume", "ClusterRole", "ClusterRoleBinding")
OPERATORS_KINDS = ("PodMonitor", "PrometheusRule")  # Of an operator that is not there.
QUIET_S = 2.0  # Controllers that have done nothing for so long wait for a kubelet.
GPU_NODES, CPU_NODES = 4, 2
_RENDER = """
import sys, yaml
from helm_python.chart import Chart
with Chart.load("deploy/helm") as chart:
    made = chart.render(values=yaml.safe_load(sys.stdin), name="east", namespace="prod")
print("\\n---\\n".join(text for name, text in made.items() if name.endswith(".yaml")))
"""

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    question: str
    found: str
    holds: bool


class RefusedError(Exception):
    """The API server refuses; the message is its own."""


def kubectl(*words: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["kubectl", *words], input=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RefusedError(done.stderr.strip())
    return done.stdout


def apply(objects: list[Object], namespace: str) -> None:
    """Apply objects, in this namespace if they name none."""
    text = yaml.safe_dump_all(_placed(each, namespace) for each in objects)
    words = ("apply", "--server-side", "--force-conflicts", "--validate=false", "-f", "-")
    kubectl(*words, given=text)


def check(one: Object, namespace: str) -> None:
    """Have the API server check an object, unknown fields too, without keeping it.

    Raises:
        RefusedError: the object is not taken.
    """
    one = _placed(one, namespace)
    version, kind = one["apiVersion"], one["kind"].lower()
    group = f"/apis/{version}" if "/" in version else f"/api/{version}"
    plural = kind.removesuffix("y") + "ies" if kind.endswith("y") else f"{kind}s"
    place = one["metadata"].get("namespace")
    path = f"{group}/{plural}" if place is None else f"{group}/namespaces/{place}/{plural}"
    checked = f"{path}?dryRun=All&fieldValidation=Strict"
    kubectl("create", "--raw", checked, "-f", "-", given=json.dumps(one))


def _placed(one: Object, namespace: str) -> Object:
    if one["kind"] in CLUSTER_KINDS:
        return one
    return one | {"metadata": {"namespace": namespace} | one["metadata"]}


def listed(kind: str, namespace: str) -> list[Object]:
    found: list[Object] = json.loads(kubectl("get", kind, "-n", namespace, "-o", "json"))["items"]
    return found


def manifests(name: str) -> list[Object]:
    return [*yaml.safe_load_all((MANIFESTS / name).read_text())]


def rendered(example: Path, python: str) -> list[Object]:
    """The chart's manifests with these values, without those of the Prometheus operator."""
    made = subprocess.run(
        [python, "-c", _RENDER], input=example.read_bytes(), capture_output=True, check=True
    )
    found = (each for each in yaml.safe_load_all(made.stdout) if each is not None)
    return [each for each in found if each["kind"] not in OPERATORS_KINDS]


class Kubelets:
    """The machines of the cluster."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}  # Of pods, by uid.
        self._known: dict[str, dict[str, str]] = {}  # States of pods, by namespace.

    def add(self, name: str, labels: dict[str, str], taints: list[Object]) -> None:
        labels |= {"kubernetes.io/hostname": name}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        apply([node], "default")
        # Without a controller of their life cycle the taint of new nodes would stay.
        _patch("node", name, {"spec": {"taints": taints}})
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "1"}
        ready = [{"type": "Ready", "status": "True", "reason": "R", "message": ""}]
        status = {"capacity": amounts, "allocatable": amounts, "conditions": ready}
        _patch("node", name, {"status": status}, "--subresource=status")

    def follow(self, namespace: str) -> list[str]:
        """Do what controllers wait for, one pod at a time, until nothing is left; return what
        became of the pods, in order.
        """
        events: list[str] = []
        while True:
            pods = self._settled(namespace)
            states = {each["metadata"]["name"]: _state(each) for each in pods}
            known = self._known.get(namespace, {})
            changed = [(name, state) for name, state in states.items() if known.get(name) != state]
            # A pod that is ready is what the controller had waited for.
            changed.sort(key=lambda change: change[1] != "is ready")
            events += [f"{name} {state}" for name, state in changed]
            self._known[namespace] = states
            waiting = [each for each in pods if _state(each) in ("ends", "starts")]
            if not waiting:
                return events
            self._serve(namespace, waiting[0])

    def _settled(self, namespace: str) -> list[Object]:
        """The pods, once they have not changed for a while."""
        pods = listed("pods", namespace)
        while True:
            time.sleep(QUIET_S)
            before, pods = pods, listed("pods", namespace)
            if pods == before:
                return pods

    def _serve(self, namespace: str, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if _state(pod) == "ends":
            kubectl("delete", "pod", name, "-n", namespace, "--grace-period=0", "--force")
            return
        address = self._addresses.setdefault(uid, f"10.1.0.{len(self._addresses) + 1}")
        ready = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        status_patch = {"status": status | {"conditions": ready}}
        _patch("pod", name, status_patch, "--subresource=status", "-n", namespace)


def _patch(kind: str, name: str, change: Object, *more: str) -> None:
    kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change), *more)


def _state(pod: Object) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "ends"
    if "nodeName" not in pod["spec"]:
        return "has no machine"
    conditions = pod.get("status", {}).get("conditions", [])
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return "is ready" if is_ready else "starts"


def namespace_of(name: str, standard: str) -> None:
    """Make a namespace with this pod security standard, and what the examples need."""
    labels = {"pod-security.kubernetes.io/enforce": standard}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "kvrs"}}
    volume = f"model-{name}"
    claim = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": volume,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    source = {
        "accessModes": ["ReadOnlyMany"],
        "capacity": {"storage": "1Gi"},
        "storageClassName": "",
        "nfs": {"server": "files.example", "path": "/models"},
    }
    apply([made], "default")
    apply(
        [
            secret | {"stringData": {"secret": "s" * 32, "admin-token": "t" * 32}},
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": source,
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "model"},
                "spec": claim,
            },
        ],
        name,
    )


def taken(sources: dict[str, list[Object]]) -> Iterator[Answer]:
    """Each object is taken as it is."""
    for name, objects in sources.items():
        refused = []
        for each in objects:
            try:
                check(each, "prod")
            except RefusedError as error:
                refused.append(f"{each['kind']}: {error}")
        count = f"{len(objects) - len(refused)} of {len(objects)}"
        question = f"objects of {name} that are taken, without an unknown field"
        yield Answer(question, "; ".join([count, *refused]), not refused)


def order(kubelets: Kubelets) -> Iterator[Answer]:
    """The order in which the proxies of kvrs.yaml start, are updated and end."""
    apply(manifests("kvrs.yaml"), "prod")
    started = kubelets.follow("prod")
    wanted = ["kvrs-0 starts", "kvrs-0 is ready", "kvrs-1 starts", "kvrs-1 is ready"]
    yield Answer(
        "proxies start one after the other, `restricted`", ", ".join(started), started == wanted
    )
    machines = {each["spec"]["nodeName"] for each in listed("pods", "prod")}
    yield Answer("machines of two proxies", ", ".join(sorted(machines)), len(machines) == 2)
    kubectl("rollout", "restart", "statefulset/kvrs", "-n", "prod")
    updated = kubelets.follow("prod")
    steps = [f"kvrs-{at} {what}" for at in (1, 0) for what in ("ends", "starts", "is ready")]
    yield Answer(
        "an update takes the last one first, and one at a time",
        ", ".join(updated),
        updated == steps,
    )


def disruption(kubelets: Kubelets) -> Iterator[Answer]:
    """A drain of machines evicts one proxy at a time."""
    answers = []
    for name in ("kvrs-0", "kvrs-1"):
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        path = f"/api/v1/namespaces/prod/pods/{name}/eviction"
        try:
            kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction))
            answers.append("evicted")
        except RefusedError as error:
            answers.append("refused" if "disruption budget" in str(error) else str(error))
    yield Answer(
        "evictions of two proxies at once", ", ".join(answers), answers == ["evicted", "refused"]
    )
    kubelets.follow("prod")


def restricted() -> Iterator[Answer]:
    """A control: the standard is enforced, and refuses what needs more."""
    pods = next(
        each
        for each in manifests("machines.yaml")
        if each["metadata"]["name"] == "kvrs-agent" and each["kind"] == "StatefulSet"
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "agent"},
        "spec": pods["spec"]["template"]["spec"],
    }
    try:
        check(pod, "prod")
        found = "taken"
    except RefusedError as error:
        found = "refused" if "violates PodSecurity" in str(error) else str(error)
    yield Answer(
        "an agent with a hostPath where `restricted` is enforced", found, found == "refused"
    )


def machines(kubelets: Kubelets) -> Iterator[Answer]:
    """Servers and agents of machines.yaml, on tainted machines of which one is spare."""
    apply(manifests("machines.yaml"), "machines")
    kubelets.follow("machines")

    def places() -> dict[str, str]:
        pods = listed("pods", "machines")
        return {each["metadata"]["name"]: each["spec"].get("nodeName", "none") for each in pods}

    first = places()
    pairs = [
        ("vllm-prefill-0", "kvrs-agent-0"),
        ("vllm-decode-1", "kvrs-agent-1"),
        ("vllm-decode-2", "kvrs-agent-2"),
    ]
    together = sum(first[server] == first[agent] != "none" for server, agent in pairs)
    yield Answer(
        "servers on the machine of the agent with their number", f"{together} of 3", together == 3
    )
    count = len({first[agent] for _, agent in pairs})
    yield Answer("machines of the three agents", str(count), count == 3)
    for name in ("vllm-decode-1", "kvrs-agent-2"):
        kubectl("delete", "pod", name, "-n", "machines", "--wait=false")
        kubelets.follow("machines")
        is_back = places() == first
        yield Answer(f"{name} is back on its machine after it was deleted", str(is_back), is_back)
    slices = listed("endpointslices", "machines")
    named = {
        each.get("hostname")
        for one in slices
        if one["metadata"]["labels"]["kubernetes.io/service-name"] == "engines"
        for each in one["endpoints"]
    }
    yield Answer(
        "pods with a name below `engines`, on the machines' network",
        f"{len(named)} of 6",
        named == first.keys(),
    )


def discovery(kubelets: Kubelets, objects: list[Object]) -> Iterator[Answer]:
    """A proxy finds instances by labels with the account that the chart gives it."""
    apply(objects, "prod")
    kubelets.follow("prod")
    container = {"name": "vllm", "image": "vllm"}
    for name, role in (("d-0", "decode"), ("d-1", "decode"), ("p-0", "prefill")):
        labels = {"kvrs.io/role": role, "kvrs.io/model": "llama"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}}
        apply([pod | {"spec": {"nodeName": "cpu-0", "containers": [container]}}], "engines")
    kubelets.follow("engines")
    addresses = {
        each["metadata"]["name"]: each["status"]["podIP"] for each in listed("pods", "engines")
    }
    with as_account("east"):
        yield _found(
            "instances by labels, with the chart's account",
            "engines",
            {addresses["d-0"], addresses["d-1"]},
        )
    kubectl("delete", "pod", "d-1", "-n", "engines", "--wait=false")
    with as_account("east"):
        yield _found("the same while one is ordered to end", "engines", {addresses["d-0"]})
        yield _found("pods of another namespace", "prod", "HTTP 403: Forbidden")
    account = "--as=system:serviceaccount:prod:east"
    may = [
        verb
        for verb in (
            "list pods",
            "get pods",
            "watch pods",
            "delete pods",
            "list secrets",
            "get configmaps",
        )
        if _may(verb, account)
    ]
    yield Answer(
        "what the account may do in the engines' namespace", ", ".join(may), may == ["list pods"]
    )


def _may(order: str, account: str) -> bool:
    try:
        return kubectl("auth", "can-i", *order.split(), "-n", "engines", account).strip() == "yes"
    except RefusedError:
        return False


@contextmanager
def as_account(name: str) -> Iterator[None]:
    """KUBECONFIG is that of a service account of `prod` in this context."""
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": kubectl("create", "token", name, "-n", "prod").strip()}
    before = os.environ["KUBECONFIG"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        os.environ["KUBECONFIG"] = file.name
        try:
            yield
        finally:
            os.environ["KUBECONFIG"] = before


def _found(question: str, namespace: str, wanted: set[str] | str) -> Answer:
    service = ServiceSettings(
        id="decode",
        pods="kvrs.io/role=decode,kvrs.io/model=llama",
        namespace=namespace,
        port=8000,
        role=Role.DECODE,
    )
    try:
        found: set[str] | str = {*asyncio.run(pod_addresses(service))}
    except PodsUnknownError as error:
        found = str(error)
    shown = found if isinstance(found, str) else f"{len(found)}"
    return Answer(question, shown, found == wanted)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--charts-python", default=str(ROOT / ".venv-charts/bin/python"))
    options = parser.parse_args()
    record = Record(timed=False)
    if listed("nodes", "default"):
        parser.error("the cluster of KUBECONFIG has machines; allowed: one without")
    version = json.loads(kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    examples = sorted((ROOT / "deploy/helm/ci").glob("*.yaml"))
    charts = {
        f"the chart with {each.name}": rendered(each, options.charts_python) for each in examples
    }
    plain = {name: manifests(name) for name in ("kvrs.yaml", "machines.yaml", "vllm.yaml")}
    kubelets = Kubelets()
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    for at in range(GPU_NODES):
        kubelets.add(f"gpu-{at}", {"kvrs.io/engines": "true"}, [taint])
    for at in range(CPU_NODES):
        kubelets.add(f"cpu-{at}", {}, [])
    for name, standard in (
        ("prod", "restricted"),
        ("machines", "privileged"),
        ("engines", "privileged"),
    ):
        namespace_of(name, standard)
    labelled = charts["the chart with labelled-values.yaml"]
    parts: tuple[Callable[[], Iterator[Answer]], ...] = (
        lambda: taken(plain | charts),
        restricted,
        lambda: order(kubelets),
        lambda: disruption(kubelets),
        lambda: machines(kubelets),
        lambda: discovery(kubelets, labelled),
    )
    answers = [answer for part in parts for answer in part()]
    lines = [f"Kubernetes {version}", ""]
    lines += [
        f"{'yes' if each.holds else 'NO ':3}  {each.question}: {each.found}" for each in answers
    ]
    print("\n".join(lines))
    rows = [
        {"question": each.question, "found": each.found, "holds": each.holds} for each in answers
    ]
    is_void = record.keep(
        options.out, "kubernetes_api", {"version": version, "answers": rows}, "\n".join(lines)
    )
    return 0 if all(each.holds for each in answers) and not is_void else 1


if __name__ == "__main__":
    sys.exit(main())
