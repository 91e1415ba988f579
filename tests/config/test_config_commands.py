"""`kvrs config show`, `diff`, `init` and `schema`."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from kvrs.cli import app
from kvrs.config.cluster import Backend
from kvrs.config.file import Config, leaves, load_config, parse_config
from kvrs.config.presets import SystemPreset
from kvrs.config.schema import first_file, json_schema, with_commands
from kvrs.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


def config(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["config", *map(str, arguments)])


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.yaml"
    path.write_text("policy:\n  name: rom\ngossip: {enabled: true, probe_interval_s: 2.5}\n")
    return path


def test_show_names_the_origin_of_each_value(tuned: Path) -> None:
    """Line of the file or default; the text is a file with the same configuration."""
    shown = config("show", tuned).stdout

    assert "  name: rom  # tuned.yaml:2\n" in shown
    assert "  handoff: own_pair  # default\n" in shown
    assert "  probe_interval_s: 2.5  # tuned.yaml:3\n" in shown
    assert parse_config(yaml.safe_load(shown)) == load_config(tuned)


def test_show_leaves_out_defaults_that_the_engine_does_not_read(tmp_path: Path) -> None:
    """But for what the file itself sets; `--json` has all of them."""
    path = tmp_path / "kvrs.yaml"
    path.write_text(first_file(Backend.VLLM) + "elastic: {min_ranks: 2}\n")

    shown = config("show", path).stdout
    found = yaml.safe_load(shown)

    assert found["elastic"] == {"min_ranks": 2}
    assert not {"state_plane", "speculation"} & found.keys()
    assert "engine" not in found["cluster"]
    assert "tp" not in found["cluster"]["nodes"][0]["instances"][0]
    left_out = int(re.findall(r"# (\d+) defaults that vllm does not read", shown)[0])
    everything = [*leaves(json.loads(config("show", path, "--json").stdout)["config"])]
    assert len([*leaves(found)]) + left_out == len(everything)


def test_show_as_json_has_the_origins_by_path(tuned: Path) -> None:
    """Scripts read `config` and `from`."""
    found = json.loads(config("show", tuned, "--json").stdout)

    assert found["config"] == load_config(tuned).model_dump(mode="json")
    assert found["from"]["policy.name"] == "tuned.yaml:2"
    assert found["from"]["cluster.nodes.1.instances.0.role"] == "default"


def test_show_without_a_file_shows_the_defaults() -> None:
    """The defaults shown are those of an empty file."""
    assert parse_config(yaml.safe_load(config("show").stdout)) == Config()


@pytest.mark.parametrize("preset", list(SystemPreset))
def test_presets_are_valid_files_whose_values_show_their_place(preset: SystemPreset) -> None:
    """Each is a YAML file of its own, and differs from the defaults."""
    shown = json.loads(config("show", "--preset", preset.value, "--json").stdout)

    assert shown["config"] == load_config(preset.path).model_dump(mode="json")
    assert shown["from"]["policy.name"].startswith(f"{preset.value}.yaml:")
    assert shown["from"]["backup.mode"].startswith(f"{preset.value}.yaml:")
    assert load_config(preset.path) != Config()


@pytest.mark.parametrize("preset", list(SystemPreset))
def test_a_preset_says_in_one_sentence_what_it_is(preset: SystemPreset) -> None:
    """Its file, the command and the documentation have the same one."""
    shown = config("show", "--preset", preset.value).stdout
    comment = shown[: shown.index("\nproxy:")].replace("\n# ", " ")
    page = (DOCS / "research" / "presets.md").read_text()

    assert comment == f"# {preset.line}"
    assert f"| `{preset.value}` | {preset.summary} |\n" in page
    assert preset.summary.endswith(".")


def test_ranks_and_drafts_of_a_preset_are_for_the_embedded_engine(tmp_path: Path) -> None:
    """Before DistServe `raidserve` is its backup."""
    path = tmp_path / "own.yaml"
    path.write_text("cluster: {backend: distserve}")

    for preset in (SystemPreset.RAIDSERVE, SystemPreset.LUMEN):
        found = load_config(path, preset=preset)
        assert found.cluster.nodes == Config().cluster.nodes
        assert found.backup == load_config(preset.path).backup


def test_a_file_overrides_a_preset_and_the_environment_overrides_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections are merged key by key."""
    path = tmp_path / "own.yaml"
    path.write_text("policy: {name: auto}\nbackup:\n")
    monkeypatch.setenv("KVRS_BACKUP__ALPHA", "2.5")

    shown = json.loads(config("show", path, "--preset", "lumen", "--json").stdout)

    assert shown["config"]["policy"]["name"] == "auto"
    assert shown["from"]["policy.name"] == "own.yaml:1"
    assert shown["config"]["policy"]["restored_at"] == "holder"
    assert shown["from"]["policy.restored_at"].startswith("lumen.yaml:")
    assert shown["config"]["backup"]["mode"] == "remote"
    assert shown["config"]["backup"]["alpha"] == 2.5
    assert shown["from"]["backup.alpha"] == "KVRS_BACKUP__ALPHA"


@pytest.mark.parametrize("text", ["7", "policy: 3", "backup: {mode: none}"])
def test_a_file_with_faults_over_a_preset_has_the_faults(tmp_path: Path, text: str) -> None:
    """The faults are the same as without a preset."""
    path = tmp_path / "own.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as alone:
        load_config(path)
    with pytest.raises(ConfigError) as over:
        load_config(path, preset=SystemPreset.LUMEN)

    assert alone.value.faults == over.value.faults


def test_show_never_prints_a_secret(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no settings: files or variables hold them."""
    monkeypatch.setenv("KVRS_SECRET", "correct-horse-battery")
    monkeypatch.setenv("KVRS_ADMIN_TOKEN", "correct-horse-battery")

    assert "correct-horse" not in config("show", tuned).output


def test_init_writes_a_file_and_keeps_one_that_exists(tmp_path: Path) -> None:
    """Nothing is overwritten."""
    path = tmp_path / "kvrs.yaml"

    assert config("init", path, "--for", "vllm").exit_code == 0
    written = path.read_text()
    again = config("init", path)

    assert isinstance(again.exception, ConfigError)
    assert "exists" in str(again.exception)
    assert path.read_text() == written
    assert load_config(path).cluster.backend == "vllm"


def test_schema_prints_the_json_schema() -> None:
    """Editors take it from a file."""
    shown = json.loads(config("schema").stdout)

    assert shown == json.loads(with_commands(json.dumps(json_schema())))


def test_an_unknown_key_in_a_section_that_may_be_null_is_a_fault() -> None:
    """The allowed keys of `tls` are found behind `TlsSettings or null`."""
    with pytest.raises(ConfigError, match=r"proxy\.tls\.foo: unknown key; allowed: cert, client"):
        parse_config({"proxy": {"tls": {"cert": "a", "key": "b", "foo": 1}}})


def test_a_document_of_nested_aliases_is_read_at_once(tmp_path: Path) -> None:
    """Places are looked for once per node, not once per path through aliases."""
    path = tmp_path / "laughs.yaml"
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path.write_text("\n".join(["a0: &a0 [x]", *levels]))

    with pytest.raises(ConfigError, match="a11: unknown key"):
        load_config(path)
