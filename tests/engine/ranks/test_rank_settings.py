"""Settings of several ranks that an instance refuses before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from kvrs.config.cluster import ElasticSettings, ExpertSettings, InstanceSettings
from kvrs.config.exposure import check_exposure
from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.settings import check_layouts, layout_of
from kvrs_lab.cluster.ports import resolve_ports

pytestmark = [pytest.mark.engine, pytest.mark.network]


def document(model: Path | None = None, **ranks: Any) -> dict[str, Any]:
    both = {"id": "b0", "role": "both", **ranks}
    cluster = {"nodes": [{"id": "n0", "instances": [both]}]}
    return {"cluster": cluster | ({} if model is None else {"model": str(model)})}


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ({"tp": 5}, "tp 5: the model has 2 KV heads and 4 tiles, allowed: 1 to 4"),
        ({"pp": 5}, "pp 5: a model of 4 layers has 1 to 4 stages"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(
    tiny_model: Path, ranks: dict[str, Any], reason: str
) -> None:
    """With the instance and what its model allows; the launcher asks before it starts anything."""
    with pytest.raises(ConfigError) as refused:
        check_layouts(parse_config(document(tiny_model, **ranks)))

    (line,) = refused.value.faults
    assert line.startswith("cluster.nodes: instance 'b0': ")
    assert reason in line


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ({"tp": 0}, "tp: got 0"),
        ({"tp": 16, "pp": 8}, "128 ranks, which are tp times pp; allowed: 64"),
        (
            {"pp": 2, "stage_hosts": [{"node": "n0"}] * 3},
            "3 stage_hosts with 2 stages; allowed: at most 2",
        ),
        ({"stage_hosts": [{"node": "n0"}]}, "stage_hosts with 1 rank; allowed: none, it is one"),
        (
            {"pp": 2, "stage_hosts": [{"node": "n7"}]},
            "instance 'b0' has stage 1 on node 'n7'; allowed: n0",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    ranks: dict[str, Any], reason: str
) -> None:
    """Whatever the model."""
    with pytest.raises(ConfigError) as refused:
        parse_config(document(**ranks))

    assert any(reason in line for line in refused.value.faults), refused.value.faults


def test_more_ranks_than_an_instance_has_are_not_waited_for() -> None:
    """It could never serve."""
    with pytest.raises(ConfigError, match=r"2 ranks; allowed with elastic\.min_ranks: 3: as many"):
        parse_config(document(tp=2) | {"elastic": {"min_ranks": 3}})


def test_stages_in_hosts_count_no_ranks_of_others() -> None:
    """A number of ranks of all stages, with which one of them would wait, has no meaning."""
    divided = document(pp=2, stage_hosts=[{"node": "n0"}])

    with pytest.raises(ConfigError, match=r"elastic\.min_ranks: got 2; allowed with .*'b0'.*: 1"):
        parse_config(divided | {"elastic": {"min_ranks": 2}})


def test_ports_of_stage_hosts_are_addresses_of_the_cluster() -> None:
    """Used once, and beyond loopback only with a secret; `kvrs lab up` chooses those that are 0."""
    divided = document(pp=2, port=9000, stage_hosts=[{"node": "n0", "port": 9000}])
    with pytest.raises(ConfigError, match=r"port 127\.0\.0\.1:9000 is used 2 times"):
        parse_config(divided)

    open_to_all = document(pp=2, stage_hosts=[{"node": "n0", "host": "0.0.0.0"}])
    with pytest.raises(ConfigError, match=r"stage 1: host: got '0\.0\.0\.0' without a secret"):
        check_exposure(parse_config(open_to_all), {})

    chosen = resolve_ports(parse_config(document(pp=2, stage_hosts=[{"node": "n0"}])))
    (host,) = chosen.cluster.nodes[0].instances[0].stage_hosts
    assert host.port > 0


def test_a_node_has_an_instance_or_a_stage() -> None:
    divided = document(pp=2, stage_hosts=[{"node": "n1"}])
    divided["cluster"]["nodes"].append({"id": "n1"})
    assert parse_config(divided).cluster.nodes[1].instances == []

    divided["cluster"]["nodes"].append({"id": "n2"})
    with pytest.raises(ConfigError, match="node 'n2' has no instances; allowed: at least one, or"):
        parse_config(divided)


def test_a_host_of_a_stage_has_a_name_of_its_own() -> None:
    divided = document(pp=2, stage_hosts=[{"node": "n0"}])
    instances = divided["cluster"]["nodes"][0]["instances"]
    path, taken = "cluster.nodes.0.instances", {"id": "b0-stage-1", "role": "both"}
    for beside, says in (
        ([*instances, taken], f"1.id: got 'b0-stage-1', .* id of the host of stage 1 of {path}.0;"),
        ([taken, *instances], f"1.id: got 'b0-stage-1', .* of {path}.1, and that of {path}.0;"),
    ):
        divided["cluster"]["nodes"][0]["instances"] = beside
        with pytest.raises(ConfigError, match=f"{path}.{says}"):
            parse_config(divided)


def test_ranks_are_those_of_the_embedded_engine_on_processors() -> None:
    """Other engines have their own."""
    on_gpu = document(tp=2)
    on_gpu["cluster"]["engine"] = {"device": "cuda"}

    with pytest.raises(ConfigError, match=r"has 2 ranks; allowed with .*cuda: 1"):
        parse_config(on_gpu)


def test_experts_of_one_unit_cannot_be_split(tiny_experts: Path, tiny_model: Path) -> None:
    """The key, its value and what is allowed; a dense model has no experts to split."""
    two = InstanceSettings.model_validate({"id": "d0", "role": "decode", "tp": 2}, strict=False)
    split = ElasticSettings(experts=ExpertSettings(layout="split"))
    experts, dense = (ModelConfig.from_directory(each).units for each in (tiny_experts, tiny_model))

    with pytest.raises(
        ConfigError, match=r"elastic\.experts\.layout: got 'split'; allowed: 'whole', an expert"
    ):
        layout_of(two, experts, split)
    assert layout_of(two, dense, split) == layout_of(two, dense)


def test_heads_that_are_left_over_are_spread_where_that_is_asked_for(tiny_model: Path) -> None:
    """Two heads on three ranks."""
    units = ModelConfig.from_directory(tiny_model).units
    three = {"id": "d0", "role": "decode", "tp": 3}

    spread = layout_of(
        InstanceSettings.model_validate(three, strict=False),
        units,
        ElasticSettings(spread_heads=True),
    )
    whole = layout_of(InstanceSettings.model_validate(three, strict=False), units)

    assert spread is not None
    assert whole is not None
    assert [layout.spread(0) for layout in (spread, whole)] == [(0, 1), ()]
