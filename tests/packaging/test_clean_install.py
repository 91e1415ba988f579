"""The wheel, built from the sdist and installed without extras into an empty environment."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import kvrs
from kvrs.errors import EXTRAS

pytestmark = [pytest.mark.package, pytest.mark.process, pytest.mark.network]

ROOT = Path(__file__).parents[2]
LARGEST_MB = 140
CONFIG = """
proxy: {port: 0, admin_port: 0}
cluster:
  nodes:
    - id: n0
      instances:
        - {id: p0, role: prefill, port: 1, page_port: 2}
        - {id: d0, role: decode, port: 3, page_port: 4}
"""


class Install(NamedTuple):
    bin: Path
    size_mb: float

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment, away from the checkout."""
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.bin,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    folder = tmp_path_factory.mktemp("install")
    python = [sys.executable, "-m"]
    dist = Path(os.environ.get("KVRS_PACKAGE_DIR") or folder / "dist")
    run(*python, "build", "--outdir", str(dist), str(ROOT))
    (wheel,) = dist.glob("*.whl")
    run(*python, "venv", str(folder / "venv"))
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    empty_mb = megabytes(packages)
    pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet"]
    run(*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel))
    return Install(folder / "venv/bin", megabytes(packages) - empty_mb)


def run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def megabytes(folder: Path) -> float:
    """Disk space, as `du` counts it."""
    files = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum(file.st_blocks for file in files) * 512 / 2**20


def test_install_is_small(install: Install) -> None:
    """A router machine needs no gigabytes of tensors."""
    print(f"site-packages: {install.size_mb:.0f} MB beyond an empty environment")

    assert install.size_mb <= LARGEST_MB


def test_nothing_of_the_extras_is_installed(install: Install) -> None:
    """Not torch, ray, matplotlib or transformers, and nothing else that only they need."""
    packages = {module.partition(".")[0] for module in sum(EXTRAS.values(), ())}
    modules = sorted(packages - {"filelock", "huggingface_hub"})
    script = f"from importlib.util import find_spec; print([*map(find_spec, {modules})])"

    assert install.run("python", "-c", script).stdout == f"{[None] * len(modules)}\n"


def test_commands_of_the_base_work(install: Install, tmp_path: Path) -> None:
    """Version, configuration, explanation, simulation."""
    config = tmp_path / "kvrs.yaml"
    config.write_text(CONFIG)
    profile = ("--profile", "opt-13b-a100-kvrs-seed", "--prompt-tokens", "1477")

    assert install.run("kvrs", "--version").stdout == f"kvrs {kvrs.__version__}\n"
    for command in (
        ("config", "check", str(config)),
        ("lab", "explain", *profile),
        ("lab", "simulate", "--requests", "5"),
    ):
        ended = install.run("kvrs", *command)
        assert ended.returncode == 0, ended.stderr
    assert "pip install 'kvrs[engine,report]'" in install.run("kvrs", "lab", "demo").stderr


def test_pages_that_messages_name_are_in_the_wheel(install: Install) -> None:
    """They lie below the prefix of the environment."""
    page = ROOT / "docs/guide/vllm.md"
    printed = install.run("kvrs", "docs", "vllm")

    assert printed.stdout == page.read_text(encoding="utf-8"), printed.stderr
    assert (install.bin.parent / "share/doc/kvrs/guide/vllm.md").is_file()
    for folder in ("guide", "research"):
        names = {file.stem for file in (ROOT / "docs" / folder).glob("*.md")}
        assert names <= {
            line.split()[0] for line in install.run("kvrs", "docs").stdout.splitlines()
        }


def test_the_public_api_can_be_imported(install: Install) -> None:
    """Types included: the wheel has py.typed."""
    script = "import kvrs.api as api; print(api.__version__, api.RecoveryPolicy.__name__)"
    packages = install.bin.parent.glob("lib/python*/site-packages/kvrs*/py.typed")

    assert install.run("python", "-c", script).stdout == f"{kvrs.__version__} RecoveryPolicy\n"
    assert sorted(path.parent.name for path in packages) == ["kvrs", "kvrs_engine", "kvrs_lab"]


def ready_s(install: Install, config: Path) -> float:
    """Seconds from the start of `kvrs proxy` to the line that says it takes requests."""
    began_s = time.monotonic()
    proxy = subprocess.Popen(
        [install.bin / "kvrs", "proxy", "--config", config],
        env=os.environ | {"KVRS_SECRET": "s" * 32},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert proxy.stderr is not None
        seen: list[str] = []
        while not seen or "proxy ready" not in seen[-1]:
            seen.append(proxy.stderr.readline())
            assert seen[-1], seen
        return time.monotonic() - began_s
    finally:
        proxy.terminate()
        proxy.communicate()


def test_a_proxy_of_the_base_install_takes_requests(install: Install, tmp_path: Path) -> None:
    """A proxy that was killed should be back before clients give up; the time is printed."""
    config = tmp_path / "kvrs.yaml"
    config.write_text(CONFIG)

    best_s = min(ready_s(install, config) for _ in range(3))

    print(f"ready after {best_s:.2f} s, the best of three")
