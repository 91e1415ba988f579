"""Modes of files that only the process may read."""

import os
import stat
from pathlib import Path

import pytest

from kvrs.config.settings import fault_of_mode, read_private
from kvrs.errors import ConfigError

ROOT, USER, OTHER = 0, 10001, 10002


def status(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "user"),
    [(0o600, USER, USER), (0o400, ROOT, ROOT), (0o440, ROOT, USER), (0o640, ROOT, USER)],
    ids=["own", "root", "fsgroup", "fsgroup-writable"],
)
def test_a_private_file_is_taken(mode: int, owner: int, user: int) -> None:
    """A secret that Kubernetes mounts for a pod with fsGroup is root's, with mode 0440."""
    assert fault_of_mode(status(mode, owner), user) is None


@pytest.mark.parametrize(
    ("mode", "owner", "user", "fault"),
    [
        (0o640, USER, USER, "(mode bits 040); allowed: 0600"),
        (0o440, ROOT, ROOT, "(mode bits 040); allowed: 0600"),
        (0o440, OTHER, USER, "(mode bits 040); allowed: 0600"),
        (0o444, ROOT, USER, "(mode bits 004); allowed: 0640"),
        (0o660, ROOT, USER, "(mode bits 020); allowed: 0640"),
    ],
    ids=["own-group", "root-group", "another-owner", "everyone", "group-writes"],
)
def test_a_file_that_others_may_use_is_refused(
    mode: int, owner: int, user: int, fault: str
) -> None:
    assert str(fault_of_mode(status(mode, owner), user)).endswith(fault)


def test_the_file_that_was_opened_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("text")
    path.chmod(0o600)
    assert read_private(str(path), "security.secret_file") == b"text"

    path.chmod(0o604)
    with pytest.raises(ConfigError, match=r"^security\.secret_file: .*mode bits 004"):
        read_private(str(path), "security.secret_file")
