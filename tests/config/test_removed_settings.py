"""Settings of earlier versions."""

from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.config.removed import REMOVED
from kvrs.errors import ConfigError

LISTS = ("nodes", "instances", "stage_hosts")


@pytest.mark.parametrize("path", REMOVED)
def test_a_removed_setting_is_refused_with_what_to_use_instead(path: str) -> None:
    document: Any = "any value"
    for key in reversed(path.split(".")):
        document = {key: [document] if key in LISTS else document}
    place = ".".join(f"{key}.0" if key in LISTS else key for key in path.split("."))

    with pytest.raises(ConfigError) as refused:
        parse_config(document)

    assert f"{place}: this setting is gone; {REMOVED[path]}" in refused.value.faults
