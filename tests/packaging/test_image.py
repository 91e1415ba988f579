"""The image of deploy/Dockerfile, built by buildah and run with the proxy's own configuration.

The base, python:3.11-slim, is pulled beforehand (`buildah pull python:3.11-slim`): tests reach for
no registry.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.test_clean_install import CONFIG

pytestmark = [pytest.mark.package, pytest.mark.process, pytest.mark.network]

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim"
IMAGE = "localhost/kvrs-tested"
LARGEST_BYTES = 130_000_000  # Beyond the base.
USER = 10001


def buildah(*arguments: str) -> str:
    command = ["buildah", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def size_bytes(image: str) -> int:
    """Bytes of the image's files, as they lie in a container's root."""
    container = buildah("from", "--pull-never", image)
    try:
        root = Path(buildah("mount", container))
        files = (path.lstat() for path in root.rglob("*") if not path.is_dir())
        return sum(file.st_size for file in files)
    finally:
        buildah("rm", container)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    if os.getuid() != 0:
        pytest.skip("needs root: containers are mounted to be looked at")
    inspected = ["buildah", "inspect", "--type", "image", BASE]
    if subprocess.run(inspected, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{BASE} is not in buildah's store: buildah pull python:3.11-slim")
    # Its own network would need one to be set up; --isolation chroot works within a container.
    options = ("--pull-never", "--network", "host", "--isolation", "chroot")
    buildah("build", *options, "-f", str(ROOT / "deploy/Dockerfile"), "-t", IMAGE, str(ROOT))
    yield IMAGE
    buildah("rmi", IMAGE)


@pytest.fixture
def container(image: str) -> Iterator[str]:
    name = buildah("from", "--pull-never", image)
    yield name
    buildah("rm", name)


def test_the_image_adds_little_to_its_base(image: str) -> None:
    added = size_bytes(image) - size_bytes(BASE)
    print(f"image: {added / 1e6:.0f} MB beyond {BASE}")
    assert added <= LARGEST_BYTES


def test_the_image_runs_a_proxy_as_no_root(container: str, tmp_path: Path) -> None:
    """By its own entry point, with the configuration mounted where the manifests have it."""
    tmp_path.chmod(0o755)
    (tmp_path / "kvrs.yaml").write_text(CONFIG)
    run = ["buildah", "run", "--network", "host", "--isolation", "chroot"]
    mounted = ["--volume", f"{tmp_path}:/etc/kvrs:ro", "--env", f"KVRS_SECRET={'s' * 32}"]
    command = ["kvrs", "proxy", "--config", "/etc/kvrs/kvrs.yaml"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*run, *mounted, container, "--", *command], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        proxy = inside(process, log)
        status = Path(f"/proc/{proxy}/status").read_text()
        os.kill(proxy, 15)
        assert process.wait(30) == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()

    (uids,) = (line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
    assert {*uids} == {str(USER)}


def inside(process: "subprocess.Popen[bytes]", log: Path) -> int:
    """The proxy's pid, once it listens."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"/etc/kvrs/kvrs.yaml" in words and b"python" in words[0]:
                    pid = int(folder.name)
                    if "proxy ready" in log.read_text():
                        return pid
        time.sleep(0.05)
    raise AssertionError(log.read_text())
