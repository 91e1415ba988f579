"""`kvrs doctor` says first that instances compute different things; room is said in tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvrs.cli.feasibility import capacity_remark
from kvrs.cli.findings import Level, ProxyAnswer, exactness_findings
from kvrs.config.file import parse_config


def row(name: str, *, health: str = "up", **lists: list[str]) -> dict[str, Any]:
    test: dict[str, list[str]] = {"differs_from": [], "near_ties_with": [], **lists}
    return {"id": name, "health": health, "self_test": test}


def said_of(*rows: dict[str, Any]) -> list[tuple[str, Level, str]]:
    state = {"instances": [*rows], "proxies": [{}]}
    answer = ProxyAnswer("http://127.0.0.1:1", state)
    return [(each.check, each.level, each.value) for each in exactness_findings(answer)]


def test_other_weights_are_a_failure_that_is_said_first() -> None:
    """Each pair once."""
    ((check, level, value),) = said_of(
        row("d0", differs_from=["d1"]), row("d1", differs_from=["d0"]), row("d2")
    )

    assert (check, level) == ("weights", Level.FAILURE)
    assert "d0 and d1" in value


def test_near_ties_are_a_warning() -> None:
    ((check, level, value),) = said_of(
        row("d0", near_ties_with=["d1"]), row("d1", near_ties_with=["d0"])
    )

    assert (check, level) == ("near-ties", Level.WARNING)
    assert "d0 and d1" in value


def test_an_instance_that_is_down_differs_from_none() -> None:
    """Its last process may have been mended."""
    assert said_of(row("d0", differs_from=["d1"]), row("d1", health="down")) == []


@pytest.mark.parametrize(
    ("capacity_bytes", "level", "tokens", "streams"),
    [
        (256 << 20, "warning", "2,048 tokens", "0 streams of 4,096"),
        (16 << 30, "note", "131,072 tokens", "32 streams of 4,096"),
    ],
)
def test_the_room_of_an_agent_is_said_in_tokens_and_streams(
    tmp_path: Path, capacity_bytes: int, level: str, tokens: str, streams: str
) -> None:
    """Llama-3.1-8B takes 131,072 bytes a token."""
    fields = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = parse_config(
        {
            "backup": {"mode": "remote", "capacity_bytes": capacity_bytes},
            "cluster": {"backend": "distserve", "model": str(tmp_path), "nodes": nodes()},
        }
    )

    (line,) = capacity_remark(config)

    assert line.startswith(f"{level}: backup.capacity_bytes: ")
    assert tokens in line
    assert streams in line


def test_without_agents_there_is_no_room_to_speak_of(tmp_path: Path) -> None:
    config = parse_config({"cluster": {"model": str(tmp_path)}})

    assert [*capacity_remark(config)] == []


def nodes() -> list[dict[str, Any]]:
    return [
        {
            "id": f"n{n}",
            "agent": {"port": 8400 + n},
            "instances": [{"id": f"p{n}", "role": "prefill"}, {"id": f"d{n}", "role": "decode"}],
        }
        for n in range(2)
    ]
