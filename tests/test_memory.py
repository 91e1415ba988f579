"""The limits of control groups, from files as the kernel writes them."""

import sys
from pathlib import Path

import pytest

from kvrs.process.memory import free_in_groups

V1 = "4:memory:/pod/engine\n3:cpuset:/\n0::/\n"
V2 = "0::/pod/engine\n"


def write(folder: Path, limit: str, used: int, *, version: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"shmem 7\n{names[2]} {cached}\n")


@pytest.mark.parametrize(("version", "own"), [(1, V1), (2, V2)])
def test_the_group_with_the_least_room_counts(tmp_path: Path, version: int, own: str) -> None:
    """That of a pod may be nearer than that of its container. Cached files make room."""
    (tmp_path / "own").write_text(own)
    root = tmp_path / "groups" / ("memory" if version == 1 else "")
    write(root / "pod" / "engine", "1000", 300, version=version, cached=50)
    free = free_in_groups(tmp_path / "own", tmp_path / "groups")
    write(root / "pod", "2000", 1800, version=version)

    assert free == 750
    assert free_in_groups(tmp_path / "own", tmp_path / "groups") == 200


@pytest.mark.parametrize(("version", "own"), [(1, V1), (2, V2), (2, "0::/../../other\n")])
def test_in_a_container_the_root_may_be_its_own_group(
    tmp_path: Path, version: int, own: str
) -> None:
    """The path is then one of the host, which cannot be seen."""
    (tmp_path / "own").write_text(own)
    root = tmp_path / "groups" / ("memory" if version == 1 else "")
    write(root, "1000", 400, version=version)

    assert free_in_groups(tmp_path / "own", tmp_path / "groups") == 600


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    """Nor without control groups, and never less than nothing."""
    (tmp_path / "own").write_text(V2)
    assert free_in_groups(tmp_path / "none", tmp_path / "groups") == sys.maxsize
    assert free_in_groups(tmp_path / "own", tmp_path / "groups") == sys.maxsize

    write(tmp_path / "groups", "max", 5, version=2)
    assert free_in_groups(tmp_path / "own", tmp_path / "groups") == sys.maxsize

    write(tmp_path / "groups", "10", 50, version=2)
    assert free_in_groups(tmp_path / "own", tmp_path / "groups") == 0
