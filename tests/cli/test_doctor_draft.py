"""`kvrs doctor` before draft models that help nobody."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.cli.findings import Finding, Level
from kvrs.cli.machine_checks import machine_findings
from kvrs.config.file import parse_config
from kvrs.profiles import catalog
from kvrs_engine.engine.random_model import (
    random_tokenizer,
    random_weights,
    write_model,
    write_tiny_model,
)
from tests.cli.test_doctor import NOT_ASKED

pytestmark = [pytest.mark.engine, pytest.mark.network]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A draft of one layer, beside a model of two."""
    write_tiny_model(tmp_path / "model", seed=0)
    tokenizer = random_tokenizer(0)
    write_model(tmp_path / "draft", tokenizer, random_weights(1, tokenizer, layers=1))
    return tmp_path / "draft"


def found(
    draft: Path,
    cluster: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    **speculation: Any,
) -> list[Finding]:
    """All findings that name the draft."""
    model = str(draft.parent / "model")
    document = {
        "cluster": {"model": model, "engine": engine or {}} | (cluster or {}),
        "speculation": {"source": "draft", "draft": str(draft), **speculation},
    }
    findings = machine_findings(parse_config(document), {}, NOT_ASKED)
    return [each for each in findings if "draft" in f"{each.check} {each.value}"]


def rewrite(draft: Path, **fields: Any) -> None:
    file = draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_draft_that_loads_sooner_is_fine(draft: Path) -> None:
    (one,) = found(draft)
    assert (one.check, one.level) == ("speculation.draft", Level.OK)
    size_bytes = (draft / "model.safetensors").stat().st_size
    assert f"{draft}, {size_bytes:,} bytes of weights" in one.value


def test_a_draft_that_takes_as_long_as_the_model_is_a_warning(draft: Path) -> None:
    """An instance that starts would skip it."""
    (one,) = found(draft.parent / "model")
    assert (one.level, "less to read than the model" in one.allowed) == (Level.WARNING, True)


def test_a_draft_with_other_ids_is_a_failure(draft: Path) -> None:
    """Each fault once: not among those of the configuration too."""
    rewrite(draft, vocab_size=640)
    tokenizer = draft / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("}", "} ", 1) + " ")

    others, size = found(draft)

    assert (others.level, size.level) == (Level.FAILURE, Level.FAILURE)
    assert "has another tokenizer.json than" in others.value
    assert "vocab_size is 640" in size.value
    assert size.allowed.startswith("512, as in ")


def test_a_draft_that_is_not_there_is_a_failure(draft: Path) -> None:
    shutil.rmtree(draft)
    (one,) = found(draft)
    assert (one.level, "has no config.json" in one.value) == (Level.FAILURE, True)


@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        ({"num_hidden_layers": 3}, "model.layers.1"),
        ({"intermediate_size": 64}, "got shape"),
        ({"model_type": "mamba"}, "model_type"),
    ],
)
def test_a_draft_that_does_not_load_is_a_failure(
    draft: Path, breaks: dict[str, Any], named: str
) -> None:
    rewrite(draft, **breaks)
    (one,) = found(draft)
    assert (one.check, one.level) == ("speculation.draft", Level.FAILURE)
    assert named in one.value


def test_a_draft_of_which_a_part_was_copied_is_a_failure(draft: Path) -> None:
    """By the header, which says how long the file has to be."""
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (one,) = found(draft)
    assert one.level is Level.FAILURE
    assert str(file) in one.value


def test_the_pace_of_each_instance_decides_whether_the_draft_is_sooner(
    draft: Path, tmp_path: Path
) -> None:
    """By name, or from a file, of which the model is read sooner than that of the draft's pace."""
    slow, small = "llama-3.1-70b-a100-vllm-tp4", "llama-3.1-8b-a100-vllm-tp1"
    profile = msgspec.to_builtins(catalog.profile(small))
    profile["load"]["weight_bytes"] //= 2
    file = tmp_path / "smaller.json"
    file.write_bytes(msgspec.json.encode(profile))

    def by(*paces: str | Path) -> Finding:
        instances = [{"id": f"b{n}", "role": "both", "pace": str(p)} for n, p in enumerate(paces)]
        (one,) = found(
            draft,
            cluster={"nodes": [{"id": "n0", "instances": instances}]},
            engine={"disk_bytes_per_s": 1e9},
            pace=small,
        )
        return one

    assert by(slow, slow).level is Level.OK
    mixed, none = by(slow, file), by(file, file)
    assert (mixed.level, none.level) == (Level.WARNING, Level.WARNING)
    assert mixed.remedy == "a smaller one: this one is skipped by b1"
    assert none.remedy == "a smaller one: this one is skipped"
