"""The folder is the architecture: what ARCHITECTURE.md says of imports and sizes, this file checks."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = sorted((ROOT / "kvrs").rglob("*.py"))

# A package may import packages of a lower rank; those of equal rank do not know each other.
RANK = {
    "ids": 0,
    "errors": 0,
    "settings": 0,
    "logs": 0,
    "protocol": 1,
    "profiles": 2,
    "text": 2,
    "policy": 3,
    "scheduling": 3,
    "gossip": 4,
    "transfer": 4,
    "config": 5,
    "agent": 6,
    "engine": 6,
    "proxy": 6,
    "replay": 6,
    "sim": 7,
    "cluster": 7,
    "demo": 8,
    "explain": 8,
    "cli": 9,
    "__main__": 10,
}
# `config` composes the sections, so it stands above them all; the section of a package is the one module of it that
# everybody may read, because it holds numbers and no code.
SECTION = "config"

PURE = {"ids", "errors", "settings", "protocol", "policy", "profiles", "scheduling"}
PURE_MODULES = {
    *(f"kvrs/transfer/{name}.py" for name in ("meter", "limiter", "faults", "store/book")),
    *(f"kvrs/gossip/{name}.py" for name in ("config", "detector", "events", "exchange", "facts", "members", "node", "probes")),
    *(f"kvrs/gossip/{name}.py" for name in ("rates", "records", "rumours", "seal", "suspicion", "wire")),
    "kvrs/agent/gpu_health.py",
    "kvrs/agent/news.py",
    "kvrs/agent/slots.py",
    "kvrs/proxy/links.py",
    "kvrs/proxy/mirror/records.py",
    *(f"kvrs/replay/{name}.py" for name in ("metrics", "oracle", "impact", "student")),
}
IMPURE_IMPORTS = {"asyncio", "socket", "time", "random", "logging", "torch", "aiohttp", "threading", "ray", "subprocess"}

# Remote code execution by design; none of them may touch what comes from a socket, a file or shared memory.
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "marshal", "dill", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "torch.load"}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                yield node.lineno, node.module or ""


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "kvrs").with_suffix("").parts
    return parts[0]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    """cli > cluster > replay, proxy, engine > transfer, gossip > policy, scheduling > profiles > protocol > ids, errors."""
    own = package_of(path)
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "kvrs" or len(parts) == 1 or parts[1] == own or parts[-1] == SECTION:
            continue

        assert RANK[parts[1]] < RANK[own] or own == SECTION, f"{path}:{line} imports {name} from {own}"


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_deciding_code_does_no_io(path: Path) -> None:
    """Pure packages take `now_s` as an argument and know no clock, socket, randomness, log or tensor."""
    relative = str(path.relative_to(ROOT))
    if package_of(path) not in PURE and relative not in PURE_MODULES:
        return

    found = {name for _, name in imports_of(path) if name.split(".")[0] in IMPURE_IMPORTS}

    assert not found, f"{relative} imports {found}"


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_comes_from_outside_can_run_code(path: Path) -> None:
    """No pickle, no eval, no yaml.load and no torch.load anywhere."""
    tree = ast.parse(path.read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}

    assert not {name for _, name in imports_of(path)} & FORBIDDEN_IMPORTS
    assert not calls & FORBIDDEN_CALLS


@pytest.mark.parametrize(
    "module",
    ["kvrs.proxy.server", "kvrs.agent.server", "kvrs.sim", "kvrs.cli", "kvrs.policy.recovery", "kvrs.scheduling.batches"],
)
def test_only_the_engine_loads_torch(module: str) -> None:
    """A proxy starts in a fraction of a second and a simulator needs no tensors."""
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    """A file is about 300 lines and never above 500, a function one thought and never above 70."""
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    assert text.count("\n") <= 500
    for function in functions:
        assert (function.end_lineno or 0) - function.lineno < 70, f"{path}:{function.lineno} {function.name}"
