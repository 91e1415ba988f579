"""How long a first use takes: from a clone to the first recovered stream, and from nothing to a
proxy in front of a running vLLM, which is a mock here.

    python -m experiments.first_steps.run [--part demo|proxy] [--repeats 3] [--out DIR]

Everything is installed into a temporary directory, from the package index in use and with an empty
cache of downloads. Exit status 1: a bar is missed.
"""

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from experiments.bench_proxy.engines import VLLM_PAIR, Engines, compile_programs
from experiments.record import ROOT, Record
from kvrs.config.file import ENV_NAME
from kvrs_testkit.free_ports import free_ports

OUT = Path(__file__).parent / "results"
BAR_RECOVERED_S = 180.0
BAR_COMPLETION_S = 60.0
BAR_INSTALLED_MB = 130.0
READY_TIMEOUT_S = 60.0
PROFILE = "opt-13b-a100-distserve-tp1"
# Of the model of the mock, for the size of its KV.
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "torch_dtype": "bfloat16",
}
BODY = {"model": "bench", "prompt": "Once upon a time", "max_tokens": 16}
# Not of a new user: other packages, settings of Ray, another number of threads.
_FOREIGN = ("PYTHON", "VIRTUAL_ENV", "RAY_", "OMP_", "MAKE", "MFLAGS")
_SIZES = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_LAST_LINES = 30


class StepError(Exception):
    """A step failed; the message ends with what it said last."""


def environment(cache: Path) -> dict[str, str]:
    """The environment of a new user, whose pip has no cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    kept.pop(ENV_NAME, None)
    return kept | {"PIP_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}


def run(*command: str | Path, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """The lines that it says."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    check(command[0], done.returncode, lines)
    return lines


def check(what: str | Path, status: int, lines: Sequence[str]) -> None:
    if status:
        last = "\n".join(lines[-_LAST_LINES:])
        raise StepError(f"{Path(what).name} ended with status {status}\n{last}")


def told_by_pip(lines: Sequence[str]) -> dict[str, Any]:
    """Packages that installations took from the index, and from folders of this machine."""
    text = "\n".join(lines)
    loaded = re.findall(r"Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)", text)
    here = [Path(name) for name in re.findall(r"Processing (\S+\.whl)", text)]
    installed = re.findall(r"^Successfully installed (.*)$", text, re.MULTILINE)
    packages = {name for names in installed for name in names.split()}
    return {
        "packages": len(packages),
        "downloaded_mb": sum(float(size) * _SIZES[unit] for size, unit in loaded) / 1e6,
        "local_mb": sum(path.stat().st_size for path in here) / 1e6,
        "torch": next((name for name in packages if name.startswith("torch-")), None),
    }


def disk_mb(folder: Path) -> float:
    """MB on the disk, as `du` counts them."""
    files = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum(file.st_blocks for file in files) * 512 / 2**20


def clone(directory: Path, env: Mapping[str, str]) -> Path:
    """The commit of this tree, with its history, as from a remote."""
    run("git", "clone", "--quiet", "--no-local", ROOT, "kvrs", cwd=directory, env=env)
    return directory / "kvrs"


def demo(directory: Path) -> dict[str, Any]:
    """The README's commands, from the clone on."""
    env = environment(directory / "cache-demo")
    begun_s, lines = time.time(), list[str]()
    marks: dict[str, float] = {}
    tree = clone(directory, env)
    marks["cloned_s"] = time.time() - begun_s
    process = subprocess.Popen(
        ["make", "demo"],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if "logs are in" in line:  # The demo's first line.
                marks["installed_s"] = time.time() - begun_s
        check("make", process.wait(), lines)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait()
    ended_s = time.time() - begun_s
    report = json.loads((tree / "out/demo/report.json").read_text())
    recovered = min(recoveries(tree / "out/demo/logs"))
    return {
        **marks,
        "recovered_s": recovered - begun_s,
        "ended_s": ended_s,
        "exact": report["exact"],
        "streams": report["streams"],
        "history_mb": disk_mb(tree / ".git"),
        "venv_mb": disk_mb(tree / ".venv"),
        **told_by_pip(lines),
    }


def recoveries(logs: Path) -> Iterator[float]:
    """When streams had their first token after a recovery, by the proxy's log."""
    for path in logs.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if " recovery " in line and "outcome=resumed" in line:
                yield datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def wheel_of(tree: Path, directory: Path) -> Path:
    """The wheel that an index would have."""
    env = environment(directory / "cache-build")
    run(sys.executable, "-m", "build", "--outdir", directory / "dist", tree, cwd=tree, env=env)
    (wheel,) = (directory / "dist").glob("*.whl")
    return wheel


def proxy(directory: Path, wheel: Path, engines: Engines) -> dict[str, Any]:
    """From an empty directory to the first completion through the proxy."""
    directory.mkdir()
    env = environment(directory / "cache")
    begun_s = time.monotonic()
    run(sys.executable, "-m", "venv", "venv", cwd=directory, env=env)
    (packages,) = directory.glob("venv/lib/python*/site-packages")
    empty_mb = disk_mb(packages)
    program = directory / "venv/bin"
    said = run(program / "python", "-m", "pip", "install", wheel, cwd=directory, env=env)
    installed_s = time.monotonic() - begun_s
    config = directory / "vllm.yaml"
    run(program / "kvrs", "config", "init", config, "--for", "vllm", cwd=directory, env=env)
    port = edit(config, engines)
    command = [str(program / "kvrs"), "proxy", "--config", str(config)]
    with started(command, directory, env | {ENV_NAME: secrets.token_hex(32)}):
        wait_ready(port, directory / "log")
        ready_s = time.monotonic() - begun_s
        answer = ask(port)
        completed_s = time.monotonic() - begun_s
    assert answer["choices"][0]["finish_reason"] == "length", answer
    return {
        "installed_s": installed_s,
        "ready_s": ready_s,
        "completed_s": completed_s,
        "installed_mb": disk_mb(packages) - empty_mb,
        "venv_mb": disk_mb(directory / "venv"),
        **told_by_pip(said),
    }


def edit(config: Path, engines: Engines) -> int:
    """Edit the first lines of the file: model, hosts, ports and profile. Returns the port for
    clients.
    """
    document = yaml.safe_load(config.read_text())
    model = config.parent / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    port, admin_port = free_ports(2)
    document["proxy"] |= {"port": port, "admin_port": admin_port}
    document["profiles"]["prefill"] = PROFILE
    nodes = [
        {
            "id": each.node,
            "instances": [{"id": each.id, "role": each.role.value, "port": engines.ports[each.id]}],
        }
        for each in engines.instances
    ]
    document["cluster"] |= {"model": str(model), "nodes": nodes}
    config.write_text(yaml.safe_dump(document))
    return port


@contextmanager
def started(command: Sequence[str], directory: Path, env: Mapping[str, str]) -> Iterator[None]:
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, env=env, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def wait_ready(port: int, log: Path) -> None:
    give_up_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_s:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
            return
        time.sleep(0.05)
    raise StepError(f"not ready within {READY_TIMEOUT_S:.0f} s\n{log.read_text()[-2000:]}")


def ask(port: int) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(BODY).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310 - our own URL
        return json.load(answer)


def measure(directory: Path, parts: Sequence[str], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "demo" in parts:
        found["demo"] = demo(directory)
        tree = directory / "kvrs"
    else:
        tree = clone(directory, environment(directory / "cache"))
    if "proxy" in parts:
        wheel = wheel_of(tree, directory)
        with Engines(compile_programs(directory / "programs"), VLLM_PAIR) as engines:
            found["proxy"] = [
                proxy(directory / f"proxy-{number}", wheel, engines) for number in range(repeats)
            ]
    return found


def taken(found: Mapping[str, Any]) -> str:
    local = f", {found['local_mb']:.0f} MB from folders of this machine" * (found["local_mb"] >= 1)
    return f"{found['packages']} packages, {found['downloaded_mb']:.0f} MB downloaded{local}"


def judged(value: float, bar: float, unit: str) -> tuple[bool, str]:
    is_met = value <= bar
    return is_met, f"{value:.0f} {unit}; bar {bar:.0f} {unit}, {'met' if is_met else 'MISSED'}"


def demo_text(found: Mapping[str, Any]) -> tuple[bool, list[str]]:
    is_met, verdict = judged(found["recovered_s"], BAR_RECOVERED_S, "s")
    exact = "every stream was exact" if found["exact"] else "NOT every stream was exact"
    return is_met and bool(found["exact"]), [
        "git clone and make demo: the seconds since the start",
        f"  cloned               {found['cloned_s']:4.0f}  {found['history_mb']:.0f} MB of history",
        f"  .venv made           {found['installed_s']:4.0f}  {taken(found)}; "
        f"{found['venv_mb']:,.0f} MB on disk; {found['torch']}",
        f"  a stream recovered   {found['recovered_s']:4.0f}",
        f"  report written       {found['ended_s']:4.0f}  {exact}",
        f"from the clone to the first recovered stream: {verdict}",
    ]


def proxy_text(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, list[str]]:
    slowest = max(rows, key=lambda row: row["completed_s"])
    in_time, time_verdict = judged(slowest["completed_s"], BAR_COMPLETION_S, "s")
    is_small, size_verdict = judged(
        max(row["installed_mb"] for row in rows), BAR_INSTALLED_MB, "MB"
    )
    return in_time and is_small, [
        f"a new venv, pip install of the wheel without extras, kvrs proxy before a mock of vLLM: "
        f"the slowest of {len(rows)}",
        f"  installed            {slowest['installed_s']:4.0f}  {taken(slowest)}; "
        f"{slowest['venv_mb']:,.0f} MB on disk with pip",
        f"  proxy ready          {slowest['ready_s']:4.0f}",
        f"  completion           {slowest['completed_s']:4.0f}",
        f"from nothing to the first completion: {time_verdict}",
        f"site-packages beyond an empty venv: {size_verdict}",
    ]


def as_text(found: Mapping[str, Any]) -> tuple[bool, str]:
    parts = []
    if "demo" in found:
        parts.append(demo_text(found["demo"]))
    if "proxy" in found:
        parts.append(proxy_text(found["proxy"]))
    is_met = all(met for met, _ in parts)
    blocks = ["\n".join(lines) for _, lines in parts]
    return is_met, "\n\n".join([*blocks, "PASSED" if is_met else "FAILED"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("demo", "proxy"), help="only this one")
    parser.add_argument("--repeats", type=int, default=3, help="of the proxy's part")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if not (ROOT / ".git").exists():
        sys.exit("this tree has no repository that could be cloned")
    record = Record()
    parts = ("demo", "proxy") if options.part is None else (options.part,)
    try:
        with tempfile.TemporaryDirectory(prefix="kvrs-first-") as name:
            found = measure(Path(name), parts, options.repeats)
    except StepError as error:
        sys.exit(str(error))
    is_met, text = as_text(found)
    print(text)
    # A part alone is for a look.
    record.keep(options.out if options.part is None else None, "first_steps", found, text)
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
