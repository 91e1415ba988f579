"""A process that waits for its start, and the file that it reads again then."""

import socket
from pathlib import Path

import pytest

from kvrs.engine.nursery import Spare
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId


def test_a_file_is_parsed_again_if_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "kvrs.yaml"
    path.write_text("transfer: {lease_s: 7}")
    line, other = socket.socketpair()
    with line, other:
        spare = Spare(path, InstanceId("e0"), line)
        first = spare.config()
        assert spare.config() is first
        path.write_text("transfer: {lease_s: 8}")
        assert (first.transfer.lease_s, spare.config().transfer.lease_s) == (7, 8)
        path.unlink()
        with pytest.raises(ConfigError, match="No such file"):
            spare.config()
