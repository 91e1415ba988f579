"""READMEs of experiments link to the kept results; the list of experiments is whole and tells how
old results are and which are void.
"""

import importlib
import json
import runpy
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from experiments import evidence, panels, pictures, run_all
from experiments.exhibits import PAPERS, Exhibit, How, panels_of, rows_of
from experiments.kept import Results
from experiments.kills import drill
from experiments.kills import run as kills_run
from experiments.kills.replayed import Said, is_equal
from experiments.programs import ALL, Experiment, Need
from experiments.readme import figures_not_kept, shown_in
from experiments.results import age, is_of_this_code, run_of, state
from experiments.run_all import chosen, listing
from experiments.verdicts import Compared

pytestmark = pytest.mark.nightly

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
READMES = sorted(EXPERIMENTS.glob("*/README.md"))


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_readmes_link_to_the_kept_results(path: Path) -> None:
    """To each of them; prose beside a link gives figures of its text only."""
    readme = path.read_text()

    assert figures_not_kept(readme, path.parent) == []
    kept = path.parent / "results"
    texts = {str(text.relative_to(kept)) for text in kept.rglob("*.txt")}
    assert set(shown_in(readme)) == texts


@pytest.mark.parametrize(
    ("changed", "falls_short"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"exact": False}, ["tokens differ, or a stream has failed"], id="exact"),
        pytest.param(
            {"fewest_streams_hit_by_a_kill": 7}, ["a kill hit 7 streams; bar 8"], id="kills"
        ),
        pytest.param({"kills_left": 1}, ["1 faults never came due"], id="left"),
        pytest.param({"by_kind": {"a": {"deaths": 0}}}, ["never: a"], id="kind"),
        pytest.param(
            {"client_visible_gap_s": {"p50": 0.2, "p99": 0.3501}},
            ["pause p99 350.1 ms; bar 350"],
            id="pause",
        ),
        pytest.param(
            {"client_visible_gap_s": {"p50": 0.9, "p99": 0.9}, "policy": "rom"}, [], id="other"
        ),
    ],
)
def test_a_kill_series_is_judged_by_all_its_bars(
    changed: dict[str, Any], falls_short: list[str]
) -> None:
    figures = {
        "policy": "auto",
        "exact": True,
        "fewest_streams_hit_by_a_kill": 8,
        "kills_left": 0,
        "by_kind": {"a": {"deaths": 1}},
        "client_visible_gap_s": {"p50": 0.2, "p99": 0.35},
    }
    assert drill.missed(figures | changed, drill.SERIES["decode"]) == falls_short


def test_a_combination_takes_its_own_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """One that it would ignore is refused, as is a combination that there is not."""
    part, options = kills_run.parsed(["decode", "embedded", "--load", "trace"])

    assert (part, options.load) == (kills_run.PARTS["decode", "embedded"], "trace")
    for words, said in (
        (["decode", "embedded", "--mix"], "takes no --mix"),
        (["proxy", "simulated"], "no series of proxy simulated"),
        (["decode", "vllm", "--option", "migrate", "--worlds", "2"], "--worlds is for --option"),
        (["decode", "vllm", "--gpu"], "--gpu is for --replays and --option recompute"),
        (["decode", "vllm", "--forced"], "--forced, --stock and --thoughts are for --replays"),
        (["decode", "sglang", "--stock"], "takes no --stock"),
    ):
        with pytest.raises(SystemExit):
            kills_run.parsed(words)
        assert said in capsys.readouterr().err


def test_a_cut_answer_is_whole_or_ends_with_an_error() -> None:
    """Half of one that looks whole, or simply stops, is wrong, as is one that goes on elsewhere."""
    calm = Said(text="abc", finish="stop", is_done=True)

    assert is_equal(replace(calm, exact=True), calm)
    assert not is_equal(replace(calm, text="ab"), calm)
    assert not is_equal(replace(calm, is_done=False), calm)
    cut = Said(text="ab", errors=[{"message": "lost"}])
    assert cut.is_begin_of(calm)
    assert not is_equal(cut, cut)
    assert not replace(cut, text="ax").is_begin_of(calm)
    assert not replace(cut, is_done=True).is_begin_of(calm)
    assert not replace(cut, finish="stop").is_begin_of(calm)
    assert not replace(cut, calls={0: "put"}).is_begin_of(calm)


def test_the_evidence_shows_the_kept_results() -> None:
    """The page and its data are made of them; `python -m experiments.run_all --readme`."""
    found = evidence.data()

    assert (evidence.DOCS / "evidence.md").read_text() == evidence.as_markdown()
    assert json.loads((evidence.DOCS / "evidence.json").read_text()) == found
    folders = {row["experiment"] for row in found["rows"]} - {"-"}
    assert folders <= {each.folder for each in ALL}
    assert len(found["headlines"]) == 5


def test_the_first_screen_of_the_evidence_is_short() -> None:
    """The claims, the picture of all rows and the meaning of the verdicts; cells are short."""
    page = evidence.as_markdown()
    first, _, papers = page.partition("\n## ")

    assert first.count("\n") <= 60
    assert f"pictures/{evidence.OVERVIEW}.svg" in first
    cells = [cell for line in papers.splitlines() if line[:2] == "| " for cell in line.split(" | ")]
    assert max(map(len, cells)) <= evidence.MOST_LETTERS + 10


@pytest.mark.parametrize("name", [evidence.OVERVIEW, *PAPERS])
def test_a_picture_of_the_evidence_shows_the_kept_results(name: str) -> None:
    """It names the digest of the data that it was drawn of."""
    drawn = (evidence.PICTURES / f"{name}.svg").read_text()

    assert f"data {panels.digest(evidence.panels()[name])}" in drawn


def test_a_picture_is_the_same_each_time(tmp_path: Path) -> None:
    """Its date and its identifiers do not change; another point changes the digest."""
    series = panels.Series("ours", [1, 2], [3.0, 4.0], half=[0.1, 0.2])
    panel = panels.Panel("a", "x", "y (s)", [series])

    pictures.write([panel], tmp_path / "a.svg")
    pictures.write([panel], tmp_path / "b.svg")

    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    moved = replace(panel, series=[replace(series, y=[3.0, 4.1])])
    assert panels.digest([panel]) != panels.digest([moved])


def test_a_run_of_its_own_has_rows_and_a_picture_of_what_it_measured(tmp_path: Path) -> None:
    """Rows without a result are missing, panels without one are left out."""
    name = "pipelines/results/table1.json"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text((EXPERIMENTS / name).read_text())

    rows = rows_of("kevlarflow", Results(tmp_path))
    pictures.draw("kevlarflow", Results(tmp_path), tmp_path / "kevlarflow.svg")
    pictures.draw("lumen", Results(tmp_path), tmp_path / "lumen.svg")

    assert {row["exhibit"] for row in rows if row["verdict"] != "missing"} == {
        "Table 1, figures 1, 5 to 7: three scenarios"
    }
    assert "Scene 3" in (tmp_path / "kevlarflow.svg").read_text()
    assert "Scene" not in (tmp_path / "lumen.svg").read_text()


@pytest.mark.parametrize("paper", PAPERS)
def test_the_kept_results_have_all_that_rows_and_pictures_show(paper: str) -> None:
    """Only a run in short may lack some of it."""
    kept = Results()

    for exhibit in PAPERS[paper].exhibits:
        if exhibit.compared and (exhibit.result is None or kept.has(exhibit.result)):
            assert exhibit.compared(kept), exhibit.name
    assert sum(len(each(kept)) for each in PAPERS[paper].panels) == len(panels_of(paper))


def test_an_exhibit_whose_experiment_was_not_run_is_missing() -> None:
    """Its row says so, and is filled by the first result that is kept."""
    waiting = Exhibit(
        *("a", How.REAL, "small", lambda _: [Compared("TTFT", 2.0, 2.0)]),
        result="notice/results/none.json",
    )

    row = waiting.row()
    asking = replace(waiting, needs="a GPU").row()
    filled = replace(waiting, result="healthy_path/results/healthy_path.json").row()

    assert (row["compared"], row["how"], row["verdict"]) == ([], "missing", "missing")
    assert (row["why"], asking["why"]) == (
        "not run yet; small",
        "not run yet, needs a GPU; small",
    )
    assert (filled["verdict"], filled["how"], filled["why"]) == ("reproduced", "real", "small")


def test_fitted_parameters_are_counted_by_the_result(tmp_path: Path) -> None:
    """A result that says how many there are is believed; the page shows them where reproduced."""
    (tmp_path / "a.json").write_text(json.dumps({"fitted": 2}))
    one = Exhibit(
        *("a", How.SIMULATED, "small", lambda _: [Compared("TTFT", 2.0, 2.0)]),
        result="a.json",
        fitted=("the factor of a clock",),
    )

    assert one.row(Results(tmp_path))["fitted"] == 2
    (tmp_path / "b.json").write_text("{}")
    row = replace(one, result="b.json").row(Results(tmp_path))
    assert evidence.verdict_of(row) == "**reproduced**, 1 parameter fitted"
    assert evidence.verdict_of(row | {"verdict": "direction"}) == "**direction**"
    void = row | {"verdict": "direction", "note": "void: busy; since a day the sentinel `a` has"}
    assert evidence.verdict_of(void) == "**direction**, but the run is void †"


def test_a_figure_beside_a_link_is_one_of_its_text(tmp_path: Path) -> None:
    """Figures of other sections, such as bars and settings, have no kept result."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results/a.txt").write_text("1,500 streams, p99 3.5 ms\n")

    readme = "# A\n\n20 runs.\n\n## Results\n\n{}\n\n[a](results/a.txt)\n"

    assert shown_in(readme) == ["a.txt"]
    all_kept = readme.format("All 1500 within 3.5 ms, `a[44]`, [45](46.md), p50.")
    assert figures_not_kept(all_kept, tmp_path) == []
    others = readme.format("All 1,501 within 3.6 ms.")
    assert figures_not_kept(others, tmp_path) == ["1501", "3.6"]


def test_every_experiment_is_listed_with_its_commands() -> None:
    """A folder with a README, and every kept result; each result is of one command."""
    folders = {path.parent.name for path in READMES}
    results = [path for each in ALL for path in each.paths]
    kept = {*EXPERIMENTS.glob("*/results/**/*.json")}

    papers = EXPERIMENTS / "paper"  # Runs programs of the others.
    assert {each.folder for each in ALL} == folders - {papers.name}
    assert len(results) == len(set(results))
    assert kept - {*papers.glob("results/*.json")} <= set(results)
    for command in filter(None, (each.command for each in ALL)):
        words = shlex.split(command)
        module = words[words.index("-m") + 1]
        assert (EXPERIMENTS.parent / f"{module.replace('.', '/')}.py").is_file(), module


def programs() -> list[str]:
    """The modules of all commands."""
    commands = [shlex.split(each.command) for each in ALL if each.command]
    return list(dict.fromkeys(words[words.index("-m") + 1] for words in commands))


# The module may be imported already.
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", programs())
def test_every_program_is_runnable(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It imports what it needs at this commit, and tells its options."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    assert ended.value.code == 0
    assert "--out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "module", ["crossover.run", "crossover.hand_off", "load_skew.run", "load_skew.rates"]
)
def test_a_run_on_distserve_is_refused_without_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DISTSERVE_HOME", raising=False)
    main = importlib.import_module(f"experiments.{module}").main
    monkeypatch.setattr(sys, "argv", [module, "--distserve"])

    with pytest.raises(SystemExit, match="2"):
        main()

    assert "DISTSERVE_HOME is not set" in capsys.readouterr().err


def test_every_kept_result_names_its_commit_and_its_time() -> None:
    """A measurement without a commit is of nothing that can be looked at."""
    for path in EXPERIMENTS.glob("*/results/**/*.json"):
        run = run_of(path)

        commit = run["commit"].removesuffix("-dirty")
        assert len(commit) == 40, path
        assert set(commit) <= set("0123456789abcdef"), path
        assert age(run).endswith(("day", "days")), path


def test_a_result_has_its_age_in_days() -> None:
    now = datetime(2026, 3, 3, 12, tzinfo=UTC)

    assert age({"at": "2026-03-03T11:00:00Z"}, now) == "0 days"
    assert age({"at": "2026-03-02T11:00:00Z"}, now) == "1 day"
    assert age({"at": "2026-01-02T11:00:00Z"}, now) == "60 days"
    assert age({}, now) == "unknown"


def git_in(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


class Repository:
    """A temporary one, with one experiment and a product; results name commits."""

    RESULT = "experiments/kills/results/a.json"

    def __init__(self, root: Path) -> None:
        self.root = root
        self._git("init", "-q")
        for name in (
            "experiments/kills/run.py",
            "experiments/kills/README.md",
            "kvrs/core/rules.py",
        ):
            self.write(name, "before")
        self.commit = self.committed()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def committed(self) -> str:
        self._git("add", ".")
        self._git("commit", "-q", "-m", "a")
        return self._git("rev-parse", "HEAD")

    def amended(self) -> None:
        """Amend the commit as a rebase does: former commits are in no history."""
        self._git("commit", "-q", "--amend", "-m", "d")

    def state(self, **run: Any) -> str:
        self.write(self.RESULT, json.dumps({"run": run}))
        return state(self.root / self.RESULT, self.root)

    def may_go_on(self) -> bool:
        self.write(self.RESULT, json.dumps({"run": {"commit": self.commit}}))
        return is_of_this_code(self.root / self.RESULT, self.root)

    def _git(self, *words: str) -> str:
        return git_in(self.root, *words)


@pytest.mark.process
@pytest.mark.parametrize(
    ("changed", "may_go_on"),
    [
        ("kvrs/core/rules.py", False),
        ("experiments/kills/run.py", False),
        ("experiments/kills/README.md", True),
    ],
)
def test_a_change_makes_a_result_only_older(tmp_path: Path, changed: str, may_go_on: bool) -> None:
    """Its program lies at its commit. One measurement has one code, so no run goes on after a
    change of it.
    """
    repository = Repository(tmp_path)

    repository.write(changed, "after")
    repository.committed()

    assert repository.state(commit=repository.commit) == "kept"
    assert repository.may_go_on() is may_go_on


@pytest.mark.process
def test_the_commit_of_a_result_may_be_unknown(tmp_path: Path) -> None:
    """Without its commit nothing is claimed; a run that was void stays so."""
    repository = Repository(tmp_path)

    assert state(tmp_path / "none.json", tmp_path) == "no result"
    assert repository.state() == "unknown: it names no commit"
    assert repository.state(commit=repository.commit, void="busy") == "void: busy"
    dirty = repository.state(commit=f"{repository.commit}-dirty")
    assert dirty.startswith("unknown: ")
    assert dirty.endswith("had changes that no commit has")
    assert repository.state(commit="0" * 40) == "unknown: there is no commit 0000000000 here"
    repository.amended()
    assert repository.state(commit=repository.commit) == "kept"


@pytest.mark.process
def test_without_a_repository_the_commit_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the tree, or a machine without git."""
    result = tmp_path / "a.json"
    result.write_text(json.dumps({"run": {"commit": "1" * 40}}))
    monkeypatch.setenv("PATH", str(tmp_path))

    found = state(result, tmp_path)

    assert found == "unknown: there is no commit 1111111111 here"


def test_names_choose_folders_and_single_results() -> None:
    """A name that is neither is an error that lists the folders."""
    assert len(chosen([])) == len(ALL)
    assert [each.name for each in chosen(["kills/decode"])] == ["kills/decode"]
    assert {each.folder for each in chosen(["lumen", "notice"])} == {"lumen", "notice"}
    with pytest.raises(
        ValueError, match=r"--only: got nothing; allowed: aborted_transfers, agent_tasks, "
    ):
        chosen(["nothing"])


def test_the_list_says_why_an_experiment_cannot_run_here() -> None:
    """With its command, its time and the state of its result."""
    need = Need("a", lambda: "no a")
    each = Experiment("no_such", ("r",), 3, "python -m experiments.no_such.run", (need,))

    lines = listing([each]).splitlines()

    assert lines[1].split() == ["no_such/r", "3", "a", "-", "-", "no", "result"]
    assert lines[2:] == ["    python -m experiments.no_such.run", "    cannot run here: no a"]


def _state_of(pid: str) -> str:
    """Z: it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.process
def test_a_run_ends_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it has started; its output is kept. One that ends by itself tells its exit
    status.
    """
    monkeypatch.setattr(run_all, "_LEAST_LIMIT_S", 10.0)
    log = tmp_path / "log"
    hangs = "sh -c 'trap \"echo interrupted; exit\" INT; sleep 60 & echo $!; wait'"
    fails = f"{sys.executable} -c 'print(2); raise SystemExit(3)'"

    assert run_all.run(Experiment("a", ("a",), 0, hangs), log).how.startswith("ended: not done")
    left, said = log.read_text().split()
    assert said == "interrupted"
    give_up_s = time.monotonic() + 30.0  # Half of the time that it would take by itself.
    while _state_of(left) != "Z":
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    monkeypatch.setattr(run_all, "_LEAST_LIMIT_S", 60.0)
    assert run_all.run(Experiment("a", ("a",), 0, fails), log).how.startswith("exit status 3 after")
    assert log.read_text() == "2\n"


@pytest.mark.process
def test_a_terminated_runner_ends_what_it_runs(tmp_path: Path) -> None:
    hangs = "sh -c 'sleep 600 & echo $!; wait'"
    code = f"""if True:
        import sys
        from experiments import run_all
        run_all.ALL = [run_all.Experiment("a", ("a",), 1, {hangs!r})]
        run_all._REST_S = 0
        sys.exit(run_all.main())
    """
    words = [sys.executable, "-c", code, "--only", "a", "--logs", str(tmp_path)]
    log, give_up_s = tmp_path / "a-a.log", time.monotonic() + 180.0
    with subprocess.Popen(words, cwd=EXPERIMENTS.parent, stdout=subprocess.DEVNULL) as runner:
        while not log.exists() or not log.read_text():
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        runner.terminate()
        assert runner.wait() == 143

    while _state_of(log.read_text().strip()) != "Z":
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
