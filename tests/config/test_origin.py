"""The file that a proxy reads again."""

from functools import partial
from pathlib import Path

import pytest

from kvrs.config.file import load_config
from kvrs.config.origin import ConfigFile
from kvrs.errors import ConfigError


def test_a_file_that_is_empty_is_not_taken_over(tmp_path: Path) -> None:
    """An editor that writes in place empties it first; all settings would be defaults."""
    path = tmp_path / "kvrs.yaml"
    file = ConfigFile(path, partial(load_config, path))
    path.write_text("policy: {slots_max: 3}\n")
    assert file().policy.slots_max == 3

    path.write_text("")

    with pytest.raises(ConfigError, match=f"{path}: the file is empty"):
        file()
