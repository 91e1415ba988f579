"""The proxies that are compared, each before the same three servers; Dynamo before its own three
workers with the same tokens.

Each is started with what its own pages offer against dead servers: retries, fallbacks, migration,
and a limit of silence of 5 s where there is one.
"""

import json
import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from experiments.bench_proxy.engines import SECRET, BenchError
from experiments.bench_proxy.proxies import HERE, MODEL_CONFIG, MissingError, started
from experiments.beside.server import MODEL
from kvrs.config.file import ENV_NAME
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.scripted_model import save_tokenizer, vocabulary

SERVERS = 3
SILENCE_S = 5
_KEY = "sk-" + "0123456789abcdef" * 4  # Of LiteLLM, which does not start without one.
_LOOK_AGAIN_S = 0.1
_READY_WITHIN_S = 90.0
_MOCKED_VOCABULARY = 1 << 17
# Their pace is about that of a token each 64 ms.
_MOCKER = [
    *("--model-name", MODEL, "--speedup-ratio", "0.2"),
    *("--num-gpu-blocks-override", "8000", "--block-size", "32"),
]
_CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass(slots=True)
class Place:
    """Where one run has its files and finds its programs."""

    directory: Path
    peers: Path  # Where peers were installed that are no part of the project.
    pause_s: float  # Between two tokens.
    prompt_tokens_per_s: float = math.inf  # Of each worker, which computes one prompt at a time.

    @property
    def pace(self) -> list[str]:
        """The options of a scripted worker."""
        rate = str(self.prompt_tokens_per_s)
        return ["--pause-s", str(self.pause_s), "--prompt-tokens-per-s", rate]


@dataclass(slots=True)
class Servers:
    """The processes behind a proxy."""

    place: Place
    commands: list[list[str]]
    environment: dict[str, str]
    ports: list[int] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, number: int) -> subprocess.Popen[bytes]:
        with (self.place.directory / f"server-{number}.log").open("ab") as log:
            return subprocess.Popen(
                self.commands[number], stdout=log, stderr=log, env=self.environment, cwd=HERE
            )

    def restart(self, number: int) -> None:
        self.processes[number].wait()
        self.processes[number] = self.start(number)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]


@dataclass(slots=True)
class Front:
    """A proxy that runs, as its clients reach it."""

    url: str
    servers: Servers
    headers: dict[str, str] = field(default_factory=dict)
    takes_chats: bool = True  # Else completions with ids.


Start = Callable[[Place], AbstractContextManager[Front]]


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    start: Start
    version: Callable[[Path], str]
    cannot: tuple[str, ...] = ()  # Faults that its workers cannot have.


@contextmanager
def _running(
    commands: list[list[str]], place: Place, environment: Mapping[str, str]
) -> Iterator[Servers]:
    """Start the servers; end those that still run at the end."""
    servers = Servers(place, commands, dict(environment))
    try:
        for number in range(len(commands)):
            servers.processes.append(servers.start(number))
        yield servers
    finally:
        for process in servers.processes:
            process.kill()
            process.wait()


@contextmanager
def _scripted(place: Place) -> Iterator[Servers]:
    ports = free_ports(SERVERS)
    module = [sys.executable, "-m", "experiments.beside.server"]
    commands = [[*module, "--port", str(port), *place.pace] for port in ports]
    with _running(commands, place, os.environ) as servers:
        servers.ports = ports
        for url in servers.urls:
            _until(partial(_answers, f"{url}/health"), f"server {url}")
        yield servers


def _until(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds.

    Raises:
        BenchError: it does not within `_READY_WITHIN_S`.
    """
    give_up_s = time.monotonic() + _READY_WITHIN_S
    while not holds():
        if time.monotonic() > give_up_s:
            raise BenchError(f"{what} was not ready in {_READY_WITHIN_S:.0f} s")
        time.sleep(_LOOK_AGAIN_S)


def _answers(url: str) -> bool:
    return _answer(url) is not None


def _answer(url: str) -> bytes | None:
    """The body of a 200; None: there is none."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own URL
            return bytes(answer.read())
    except OSError:
        return None


def _program(place: Place, peer: str, name: str) -> str:
    program = place.peers / peer / "bin" / name
    if not program.exists():
        raise MissingError(f"{peer} is not installed below --peers (README.md)")
    return str(program)


@contextmanager
def kvrs(place: Place) -> Iterator[Front]:
    with _scripted(place) as servers:
        port, admin_port = free_ports(2)
        model = place.directory / "model"
        model.mkdir()
        save_tokenizer(model)
        (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
        instances = [
            {"id": f"d{number}", "role": "decode", "port": each}
            for number, each in enumerate(servers.ports)
        ]
        document = {
            "proxy": {"port": port, "admin_port": admin_port},
            "cluster": {
                "backend": "vllm",
                "model": str(model),
                "nodes": [{"id": "n0", "instances": instances}],
            },
            "profiles": {"prefill": "opt-13b-a100-distserve-tp1"},
        }
        config = place.directory / "kvrs.yaml"
        config.write_text(json.dumps(document))
        command = [sys.executable, "-m", "kvrs", "proxy", "--config", str(config)]
        environment = {ENV_NAME: SECRET.decode()}
        with started(
            place.directory, "kvrs", command, port, "/readyz", cwd=HERE, environment=environment
        ):
            _until(lambda: _are_tested(admin_port), "kvrs: the self-tests")
            yield Front(f"http://127.0.0.1:{port}", servers)


def _are_tested(admin_port: int) -> bool:
    state = _answer(f"http://127.0.0.1:{admin_port}/kvrs/v1/state")
    rows = json.loads(state or b'{"instances": []}')["instances"]
    return len(rows) == SERVERS and all(
        row["health"] == "up" and (row["self_test"] or {}).get("done") for row in rows
    )


@contextmanager
def vllm_router(place: Place) -> Iterator[Front]:
    program = _program(place, "vllm-router", "vllm-router")
    with _scripted(place) as servers:
        port, metrics = free_ports(2)
        command = [program, "--port", str(port), "--prometheus-port", str(metrics)]
        command += ["--policy", "round_robin", "--log-level", "error"]
        command += ["--health-check-interval-secs", "1", "--worker-urls", *servers.urls]
        with started(place.directory, "vllm-router", command, port, "/health"):
            yield Front(f"http://127.0.0.1:{port}", servers)


@contextmanager
def smg(place: Place) -> Iterator[Front]:
    program = _program(place, "smg", "smg")
    with _scripted(place) as servers:
        port, metrics = free_ports(2)
        command = [program, "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        command += ["--policy", "round_robin", "--log-level", "error", "--backend", "vllm"]
        command += ["--health-check-interval-secs", "1"]
        command += ["--stream-body-stall-timeout-secs", str(SILENCE_S)]
        command += ["--worker-urls", *servers.urls]
        with started(place.directory, "smg", command, port, "/readiness"):
            yield Front(f"http://127.0.0.1:{port}", servers)


@contextmanager
def litellm(place: Place) -> Iterator[Front]:
    program = _program(place, "litellm", "litellm")
    with _scripted(place) as servers:
        (port,) = free_ports(1)
        models = [
            {
                "model_name": name,
                "litellm_params": {
                    "model": f"openai/{MODEL}",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                    "stream_timeout": SILENCE_S,
                },
            }
            for name in (MODEL, "again")
            for url in servers.urls
        ]
        config = place.directory / "litellm.yaml"
        settings = {"num_retries": 3, "fallbacks": [{MODEL: ["again"]}]}
        config.write_text(json.dumps({"model_list": models, "litellm_settings": settings}))
        command = [program, "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
        environment = {
            "LITELLM_MASTER_KEY": _KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HOME": str(place.directory),
            "PYTHONPATH": "",
        }
        with started(
            place.directory,
            "litellm",
            command,
            port,
            "/health/liveliness",
            cwd=place.directory,
            environment=environment,
        ):
            headers = {"Authorization": f"Bearer {_KEY}"}
            yield Front(f"http://127.0.0.1:{port}", servers, headers)


def dynamo(migrations: int = 3, *, is_mocked: bool = False) -> Start:
    """Dynamo's frontend, before three workers with the scripted tokens, or three of its mockers,
    whose tokens are random.
    """

    @contextmanager
    def start(place: Place) -> Iterator[Front]:
        python = _program(place, "dynamo", "python")
        model = place.directory / "model"
        model.mkdir()
        write_dynamo_model(model, is_mocked=is_mocked)
        environment = dynamo_environment(place.directory)
        if is_mocked:
            command = [python, "-m", "dynamo.mocker", "--model-path", str(model), *_MOCKER]
        else:
            script = str(Path(__file__).with_name("dynamo_worker.py"))
            command = [python, script, "--model", str(model), *place.pace]
        with _running([command] * SERVERS, place, environment) as servers:
            (port,) = free_ports(1)
            front = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
            front += ["--http-port", str(port), "--migration-limit", str(migrations)]
            environment["DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS"] = str(SILENCE_S)
            with started(
                place.directory, "dynamo", front, port, "/health", environment=environment
            ):
                url = f"http://127.0.0.1:{port}"
                _until(lambda: dynamo_workers(url) == SERVERS, "Dynamo's workers")
                yield Front(url, servers, takes_chats=False)

    return start


def write_dynamo_model(model: Path, *, is_mocked: bool = False) -> None:
    """The files of a model directory that Dynamo's frontend reads. Mockers draw their tokens from
    more than the scripted ones.
    """
    if is_mocked:
        words = {f"w{number} ": number for number in range(_MOCKED_VOCABULARY)}
        Tokenizer(WordLevel(words)).save(str(model / "tokenizer.json"))
    else:
        save_tokenizer(model)
    config = MODEL_CONFIG | {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "vocab_size": _MOCKED_VOCABULARY if is_mocked else 2000,
        "max_position_embeddings": 131_072,
        "bos_token_id": vocabulary().end_id,
        "eos_token_id": vocabulary().end_id,
    }
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def dynamo_environment(directory: Path) -> dict[str, str]:
    """The environment of its processes: discovery by files, without etcd and NATS."""
    return os.environ | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(directory / "dynamo-kv"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(HERE),
    }


def dynamo_workers(url: str) -> int:
    """How many workers its frontend knows."""
    health = json.loads(_answer(f"{url}/health") or b"{}")
    return sum(each.get("endpoint") == "generate" for each in health.get("instances", []))


def _package(peer: str, package: str) -> Callable[[Path], str]:
    def version(peers: Path) -> str:
        found = list((peers / peer).glob(f"lib/*/site-packages/{package}-*.dist-info"))
        return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else ""

    return version


SUBJECTS = (
    Subject("kvrs", kvrs, lambda _: "this commit"),
    Subject("dynamo", dynamo(), _package("dynamo", "ai_dynamo"), cannot=("malformed", "fin")),
    Subject("vllm-router", vllm_router, _package("vllm-router", "vllm_router")),
    Subject("smg", smg, _package("smg", "smg")),
    Subject("litellm", litellm, _package("litellm", "litellm")),
)
