"""Groups of instances that lend each other the hosts of their stages."""

import re
from typing import Any

import pytest

from kvrs.config.file import Config, parse_config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId


def pipeline(name: str, **keys: Any) -> dict[str, Any]:
    hosts = [{"node": f"n{name[1:]}", "port": 0} for _ in range(2)]
    return {"id": name, "role": "decode", "pp": 2, "group": "g", "stage_hosts": hosts} | keys


def document(*pipelines: dict[str, Any], **sections: Any) -> dict[str, Any]:
    prefill = {"id": "p", "instances": [{"id": "p0", "role": "prefill"}]}
    nodes = [{"id": f"n{each['id'][1:]}", "instances": [each]} for each in pipelines] + [prefill]
    return {"cluster": {"nodes": nodes}} | sections


def donors(config: Config, name: str) -> list[str]:
    return [each.id for _, each in config.cluster.donors(InstanceId(name))]


def test_donors_are_the_others_of_the_group_along_the_ring() -> None:
    """The ring is that of the ids, in any order of the file, from the own one on."""
    pipelines = (pipeline(name) for name in ("d2", "d0", "d3", "d1"))
    alone = pipeline("d4", group=None)
    config = parse_config(document(*pipelines, alone))

    assert donors(config, "d0") == ["d1", "d2", "d3"]
    assert donors(config, "d2") == ["d3", "d0", "d1"]
    assert donors(config, "d4") == donors(config, "p0") == []
    node, _ = config.cluster.donors(InstanceId("d0"))[0]
    assert node.id == "n1"


def test_each_group_has_a_ring_of_its_own() -> None:
    pipelines = [pipeline(f"d{at}", group=f"g{at % 2}", tp=1 + at % 2) for at in range(4)]
    config = parse_config(document(*pipelines))

    assert donors(config, "d0") == ["d2"]
    assert donors(config, "d3") == ["d1"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"group": None}, "instance 'd0' is alone in group 'g', a ring of one; allowed: at least"),
        ({"stage_hosts": []}, "instance 'd1' of group 'g' has 0 stage_hosts; allowed: 2, one for"),
        (
            {"stage_hosts": [{"node": "n1"}]},
            "instance 'd1' of group 'g' has 1 stage_hosts; allowed: 2, one for each stage",
        ),
        (
            {"pp": 1, "stage_hosts": []},
            "instance 'd1' of group 'g' has 1 rank; allowed: several, in stage_hosts",
        ),
        ({"tp": 2}, "instance 'd1' of group 'g' has tp: 2; allowed: 1, as instance 'd0'"),
        (
            {"pp": 3, "stage_hosts": [{"node": "n1"}] * 3},
            "instance 'd1' of group 'g' has pp: 3; allowed: 2, as instance 'd0'",
        ),
        (
            {"role": "both"},
            "instance 'd1' of group 'g' has role: both; allowed: decode, as instance 'd0'",
        ),
    ],
)
def test_what_a_group_cannot_be_is_refused_by_name(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_config(document(pipeline("d0"), pipeline("d1", **other)))


def test_instances_that_do_not_re_form_lend_nothing() -> None:
    off = {"enabled": False}
    with pytest.raises(ConfigError, match=r"elastic\.enabled: got false, with group 'g' among the"):
        parse_config(document(pipeline("d0"), pipeline("d1"), elastic=off))
    without = [pipeline(name, group=None) for name in ("d0", "d1")]
    assert parse_config(document(*without, elastic=off))


def test_only_the_embedded_engine_has_groups() -> None:
    wrong = document(pipeline("d0"), pipeline("d1"))
    wrong["cluster"] |= {"backend": "distserve", "model": "/m"}
    with pytest.raises(ConfigError, match=r"cluster\.backend: got 'distserve', with group 'g'"):
        parse_config(wrong)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65])
def test_a_group_has_the_name_of_a_process(name: str) -> None:
    with pytest.raises(ConfigError, match=r"instances\.0\.group"):
        parse_config(document(pipeline("d0", group=name), pipeline("d1", group=name)))


def test_a_gain_is_a_part() -> None:
    with pytest.raises(ConfigError, match=r"elastic\.least_gain: got -0\.1"):
        parse_config({"elastic": {"least_gain": -0.1}})
