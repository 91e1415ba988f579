"""Section `gossip`: profiles are sets of differing defaults."""

import pytest
from pydantic import ValidationError

from kvrs.config.gossip import GossipProfile, GossipSettings


def test_a_profile_changes_what_it_names_and_nothing_else() -> None:
    """wan and local differ from lan, which is the default, in a few keys each."""
    lan, wan, local = (
        GossipSettings.model_validate({"profile": name}).model_dump() for name in GossipProfile
    )

    assert GossipSettings().model_dump() == lan
    assert wan["probe_interval_s"] > lan["probe_interval_s"]
    assert wan["packet_bytes"] == lan["packet_bytes"] < local["packet_bytes"]
    assert wan["confirmations"] == lan["confirmations"] == local["confirmations"]


def test_the_file_overrides_the_profile_and_a_written_section_reads_back_equal() -> None:
    """A profile is a set of defaults; `kvrs up` writes configurations for its processes."""
    settings = GossipSettings.model_validate({"profile": "wan", "probe_interval_s": 1.0})

    assert (settings.probe_interval_s, settings.fanout) == (1.0, 4)
    assert GossipSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    "section",
    [
        {"profile": "moon"},
        {"profile": ["lan"]},
        {"profile": {}},
        {"probe_interval_s": 0.0},
        {"packet_bytes": 100},
        {"speed": 1},
    ],
)
def test_invalid_settings_are_rejected(section: dict[str, object]) -> None:
    """With a message of pydantic's, which `kvrs.config` turns into a line."""
    with pytest.raises(ValidationError):
        GossipSettings.model_validate(section)
