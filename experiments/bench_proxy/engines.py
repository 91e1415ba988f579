"""The mock engines and the load client: compiled from C, started, and given orders.

Both run on one core, so that the proxy has another for itself.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from kvrs.errors import KvrsError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport, MeasuredPrefill, Role
from kvrs.protocol.secrets import Scope, scoped_key

MODEL = "bench"
SECRET = b"bench-proxy-0123456789abcdef"
_EPOCH = 1
_GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=8, dtype_bytes=4, page_size_tokens=16)


class BenchError(KvrsError):
    """Something that the bench needs failed; the message says what."""


@dataclass(frozen=True, slots=True)
class Instance:
    id: str
    role: Role
    node: str
    listens: bool = True  # Else from the order `listen` on.
    queued: int = 0  # What it reports: more streams than it can run at a time.
    is_vllm: bool = False  # Else it speaks the instance protocol.

    def lines(self) -> str:
        """Its part of the engine's file."""
        key = scoped_key(SECRET, Scope.INSTANCE, self.id)
        info = InstanceInfo(
            id=InstanceId(self.id),
            node=NodeId(self.node),
            role=self.role,
            epoch=_EPOCH,
            pid=1,
            model=MODEL,
            fingerprint="bench",
            geometry=_GEOMETRY,
            max_model_len=131_072,
            page_port=1,
            capabilities=list(Capability),
            prefill=MeasuredPrefill("bench", 256, [0.0001, 0.001, 0.002]),
        )
        load = LoadReport(
            _EPOCH,
            queued=self.queued,
            running=0,
            free_pages=1 << 24,
            queue_delay_s=0.0,
            links=[],
            fetched_pages=0,
        )
        port = "0" if self.listens else "later"
        keys = "- -" if self.is_vllm else f"{key.key.hex()} {key.id.hex()}"
        return (
            f"instance {self.id} {port} {keys}\n"
            f"info {msgspec.json.encode(info).decode()}\n"
            f"load {msgspec.json.encode(load).decode()}\n"
        )


PAIR = (Instance("p0", Role.PREFILL, "n0"), Instance("d0", Role.DECODE, "n1"))
VLLM_PAIR = tuple(replace(each, is_vllm=True) for each in PAIR)


@dataclass(frozen=True, slots=True)
class Programs:
    """The compiled programs."""

    engine: Path
    load: Path


def compile_programs(directory: Path) -> Programs:
    """Compile both into a directory.

    Raises:
        BenchError: there is no C compiler, or it refuses the source.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise BenchError("no C compiler (cc) on this machine")
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for name in ("engine", "load"):
        source, target = Path(__file__).parent / f"{name}.c", directory / name
        command = [compiler, "-O2", "-Wall", "-Wextra", "-std=gnu11", "-o", str(target)]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchError(f"cc {source.name}: {done.stderr[:2000]}")
        made.append(target)
    return Programs(*made)


def pinned(core: int | None, command: Sequence[str | Path]) -> list[str]:
    """The command on one core; None: on any."""
    words = [str(word) for word in command]
    return words if core is None else ["taskset", "-c", str(core), *words]


class Engines:
    """All instances of one run, in one process."""

    def __init__(
        self,
        programs: Programs,
        instances: Sequence[Instance] = PAIR,
        core: int | None = None,
        texts: Path | None = None,
    ) -> None:
        self.instances = instances
        self.ports: dict[str, int] = {}
        self._programs = programs
        self._core = core
        self._texts = [] if texts is None else [texts]

    def __enter__(self) -> Self:
        with tempfile.NamedTemporaryFile("w", prefix="kvrs-bench-", suffix=".engines") as file:
            file.write("".join(instance.lines() for instance in self.instances))
            file.flush()
            self._process = subprocess.Popen(
                pinned(self._core, [self._programs.engine, file.name, *self._texts]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line == "ready\n":
                    return self
                name, port = line.split()
                self.ports[name] = int(port)
        raise BenchError("the engine ended before it was ready")

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, command: str) -> dict[str, Any]:
        """The engine's answer to one command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise BenchError(f"engine: {command}: {answer['error']}")
        return answer


class Load:
    """One run of the load client, which is going on."""

    def __init__(
        self,
        programs: Programs,
        port: int,
        options: Mapping[str, int],
        pids: Sequence[int] = (),
        core: int | None = None,
    ) -> None:
        words = [str(word) for pair in {"port": port, **options}.items() for word in pair]
        if pids:
            words += ["pids", ",".join(map(str, pids))]
        self._process = subprocess.Popen(
            pinned(core, [programs.load, *words]), stdout=subprocess.PIPE, text=True
        )
        self._last: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def wait_open(self) -> bool:
        """Until all streams have their first tokens; False: it ended before that."""
        self._read()
        return "open" in self._last

    def result(self) -> dict[str, Any]:
        while "whole" not in self._last:
            self._read()
        return self._last

    def _read(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the load client ended with status {self._process.wait()}")
        self._last = json.loads(line)


def run_load(
    programs: Programs,
    port: int,
    options: Mapping[str, int],
    pids: Sequence[int] = (),
    core: int | None = None,
) -> dict[str, Any]:
    """The load client's result; `options` are those of `load.c`."""
    with Load(programs, port, options, pids, core) as load:
        return load.result()
