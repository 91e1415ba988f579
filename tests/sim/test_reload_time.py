"""The time after which a killed instance of `kvrs lab simulate`, `compare` and `tune` is back."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs_lab.sim.case import SimulateOptions, load_case, make_world
from kvrs_lab.sim.world import World

LLAMA = "llama-3.1-70b-a100-vllm-tp4"
KILL_S = 1.0


def world(
    directory: Path, engine: dict[str, Any], *, whom: dict[str, Any] | None = None, **more: Any
) -> World:
    nodes = [{"id": f"n{n}", "instances": [{"id": f"w{n}", "role": "both"}]} for n in range(3)]
    config, fault = directory / "kvrs.yaml", directory / "faults.yaml"
    config.write_text(yaml.safe_dump({"cluster": {"engine": engine, "nodes": nodes}, **more}))
    kill = {"when": {"at_s": KILL_S}, "what": "kill", "whom": whom or {"id": "w2"}}
    fault.write_text(yaml.safe_dump([kill]))
    options = SimulateOptions(config=config, fault=fault, requests=200, rate=1.0)
    return make_world(options, *load_case(options), seed=0)


def away_s(found: World) -> float:
    """Time from the kill until the instance serves again."""
    found.cluster.log.clear()
    found.run_before(190.0)
    (line,) = (each for each in found.cluster.log if each.endswith("w2 is back"))
    return float(line.split()[0]) - KILL_S


@pytest.mark.parametrize("bytes_per_s", [None, 1e10])
def test_a_killed_instance_reads_and_loads_the_weights_of_its_profile(
    tmp_path: Path, bytes_per_s: float | None
) -> None:
    """141 GB at the disk's rate, 2 GB/s where none is set, beside the restart of the process."""
    found = world(tmp_path, {"pace": LLAMA, "disk_bytes_per_s": bytes_per_s})
    model = catalog.load(LLAMA)

    load_s = model.weight_bytes / (bytes_per_s or 2e9) + model.weight_bytes / model.bytes_per_s

    assert load_s < away_s(found) < load_s + 60.0


def test_weights_that_the_nodes_agent_has_are_not_read_again(tmp_path: Path) -> None:
    """They outlive the process, and not the node."""
    kept = world(tmp_path, {"pace": LLAMA}, state_plane={"enabled": True})
    lost = world(tmp_path, {"pace": LLAMA}, state_plane={"enabled": True}, whom={"node": "n2"})

    assert away_s(kept) < 61.0
    assert away_s(lost) > 71.0


def test_a_profile_without_bytes_of_weights_is_refused(tmp_path: Path) -> None:
    profile = msgspec.structs.replace(catalog.profile(LLAMA), load=None)
    path = tmp_path / "unknown.json"
    path.write_bytes(msgspec.json.encode(profile))

    with pytest.raises(ConfigError, match="has no load time"):
        world(tmp_path, {"pace": str(path)})
