"""One command per paper runs its programs within a budget and reports the end of each."""

import contextlib
import io
import json
import runpy
import shlex
import sys
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from experiments import exhibits
from experiments.paper import __main__ as command
from experiments.paper import plan
from experiments.paper.plan import SLACK, Budget, Planned, budget_minutes, planned
from experiments.paper.same import differences
from experiments.programs import EXPERIMENTS, PAPERS, Experiment, Need, Quick

pytestmark = pytest.mark.nightly

PROGRAMS = [*chain.from_iterable(PAPERS.values())]
WRITES = (
    "import json, sys; from pathlib import Path; out = Path(sys.argv[-1]); "
    "out.mkdir(parents=True, exist_ok=True)"
)


def commands() -> list[str]:
    """The commands of all programs of papers, the quick ones too."""
    both = [(each.command, each.quick.command if each.quick else "") for each in PROGRAMS]
    return [*dict.fromkeys(filter(None, chain.from_iterable(both)))]


@cache
def help_of(module: str) -> str:
    said, argv = io.StringIO(), sys.argv
    sys.argv = [module, "--help"]
    try:
        with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
    return said.getvalue()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("line", commands())
def test_a_command_names_a_module_and_options_that_there_are(line: str) -> None:
    words = shlex.split(line)
    module = words[words.index("-m") + 1]

    told = help_of(module)

    for option in (word for word in words if word.startswith("--")):
        assert f" {option}" in told, line


def test_all_papers_in_short_take_an_hour() -> None:
    """Their budget, too, which has a quarter more than their minutes."""
    assert budget_minutes(planned([*PAPERS], is_quick=True)) <= 60


def test_every_program_that_runs_anywhere_has_a_quick_form() -> None:
    for each in PROGRAMS:
        assert each.quick or each.needs, each.name
        assert each.quick is None or each.quick.minutes <= each.minutes, each.name


def test_every_exhibit_with_a_result_is_made_by_a_program_of_a_paper() -> None:
    """No exhibit rests on a result that no command of a paper makes again."""
    made = {str(path.relative_to(EXPERIMENTS)) for each in PROGRAMS for path in each.paths}

    assert set(exhibits.PAPERS) == set(PAPERS)
    for paper in exhibits.PAPERS.values():
        for each in paper.exhibits:
            assert each.result is None or each.result in made, each.name


@pytest.mark.parametrize(
    ("minutes", "used_s", "limit_s"),
    [
        pytest.param(2, 0, 300, id="twice its share"),
        pytest.param(2, 450, 150, id="what is left"),
        pytest.param(2, 500, None, id="less is left than it takes"),
        pytest.param(0.1, 0, 30, id="no program starts in no time"),
    ],
)
def test_a_program_has_twice_its_share_of_the_budget(
    minutes: float, used_s: float, limit_s: float | None
) -> None:
    """None goes beyond the end of it."""
    budget = Budget(total_s=600, planned_minutes=8)

    assert budget.limit_s(minutes, used_s) == limit_s


def test_a_budget_that_is_too_small_for_all_still_begins_a_program() -> None:
    """Its share is then shorter than its minutes."""
    assert Budget(total_s=60, planned_minutes=8).limit_s(4, 0) == 60


def test_a_plan_says_what_does_not_run_here_and_why() -> None:
    """It takes no minutes."""
    need = Need("a", lambda: "no a")
    lacking = Experiment("x", ("a",), 3, "python -m x", (need,), Quick(1, "python -m x --few"))
    long = Experiment("x", ("b",), 5, "python -m x")
    virtual = Experiment("x", ("c",), 2, "python -m x", (), Quick(1, "y"), is_virtual=True)

    def of(**how: bool) -> list[tuple[float, str]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "PAPERS", {"p": (lacking, long, virtual)})
            return [(each.minutes, each.why_not) for each in planned(["p"], **how)]

    assert of(is_quick=False) == [(0.0, "no a"), (5, ""), (2, "")]
    assert of(is_quick=True, twice=True) == [(0.0, "no a"), (0.0, "it has no quick form"), (2, "")]
    assert of(is_quick=True, twice=True, only_virtual=True) == [(2, "")]
    assert budget_minutes([Planned("p", long, 4.0)]) == 4 * SLACK


def test_two_results_are_the_same_apart_from_their_runs(tmp_path: Path) -> None:
    """A figure that differs is named by its place."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"

    def differ(first: Any, second: Any) -> list[str]:
        one.write_text(json.dumps({"run": {"at": 1}, "rows": first}))
        other.write_text(json.dumps({"run": {"at": 2}, "runs": [], "rows": second}))
        return differences(one, other)

    assert differ([{"a": 1.0}], [{"a": 1.0}]) == []
    assert differ([{"a": 1.0}, 2], [{"a": 1.5}, 3]) == ["rows/0/a", "rows/1"]
    assert differ([1], [1, 2]) == ["rows"]


def program(name: str, code: str, *, is_virtual: bool = False) -> Experiment:
    """A program that is one line of Python, with `out`, the folder of its results."""
    line = f"{sys.executable} -c {shlex.quote(f'{WRITES}; {code}')}"
    return Experiment("x", (name,), 1, line, (), Quick(1, line), is_virtual=is_virtual)


def keeps(name: str, figure: str = "1") -> str:
    return f"(out / '{name}.json').write_text(json.dumps(dict(run=dict(seeds=[7]), rows={figure})))"


def outcomes(
    tmp_path: Path, *found: Experiment, total_s: float = 600.0, twice: bool = False
) -> list[command.Outcome]:
    steps = [Planned("p", each, each.minutes) for each in found]
    budget = Budget(total_s, sum(each.minutes for each in found))
    run = command.Papers(steps, budget, tmp_path / "out", tmp_path)
    return run.run("p", is_quick=True, twice=twice)


@pytest.mark.process
def test_a_program_is_done_that_leaves_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that leaves none has failed, whatever it says, and its last lines are shown."""
    (done,) = outcomes(tmp_path, program("a", keeps("a")))
    assert (done.state, done.seeds, done.is_good) == ("done", [7], True)

    (failed,) = outcomes(tmp_path, program("b", "print('no such file')"))
    assert (failed.state, failed.is_good) == ("failed", False)
    assert failed.why.endswith("no such file")
    said = capsys.readouterr().out
    assert "[1/1] p: x/a, about 1 min; 10.0 min of the budget left" in said


@pytest.mark.process
def test_a_program_is_ended_at_its_limit(tmp_path: Path) -> None:
    """The one behind it has no time left."""
    sleeps = program("a", "import time; time.sleep(600)")

    ended, skipped = outcomes(tmp_path, sleeps, program("b", keeps("b")), total_s=1.0)

    assert (ended.state, ended.is_good) == ("ended", False)
    assert ended.why.startswith("ended: not done after")
    assert skipped.state == "skipped"
    assert skipped.why.startswith("less of the budget is left")


@pytest.mark.process
def test_a_program_in_virtual_time_is_repeated_and_compared(tmp_path: Path) -> None:
    same = program("a", keeps("a"), is_virtual=True)
    differs = program("b", keeps("b", "__import__('time').time_ns()"), is_virtual=True)

    found = outcomes(tmp_path, same, differs, twice=True)

    assert [each.twice for each in found] == ["same", "figures that differ: 1, first rows"]
    assert [each.is_good for each in found] == [True, False]


def test_a_result_of_this_code_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is whole and of the same command: not of the full one, and not with parts waiting."""
    each = Experiment("x", ("a",), 1, "python -m x", (), Quick(1, "python -m x --few"))
    path = tmp_path / "x/results/a.json"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(command, "is_of_this_code", lambda path: path.exists())

    def is_measured(**document: Any) -> bool:
        path.write_text(json.dumps({"run": {"command": "python -m x --few"}} | document))
        return command.is_measured(each, tmp_path, is_quick=True)

    assert is_measured()
    assert not is_measured(waiting=["a"])
    assert not is_measured(run={"command": "python -m x"})
    assert not command.is_measured(each, tmp_path / "other", is_quick=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """RaidServe with its quickest programs alone."""
    quickest = ("raidserve/shares", "raidserve/in_place")
    few = [each for each in PAPERS["raidserve"] if each.name in quickest]
    assert len(few) == 2
    monkeypatch.setattr(plan, "PAPERS", {**PAPERS, "raidserve": few})


@pytest.mark.process
@pytest.mark.usefixtures("small")
def test_a_quick_run_of_a_paper_keeps_rows_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Virtual time gives the same figures twice; nothing is written over kept results."""
    kept = {path: path.stat().st_mtime_ns for path in EXPERIMENTS.glob("*/results/*.json")}
    words = ["raidserve", "--quick", "--twice", "--minutes", "20", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["paper", *words])

    assert command.main() == 0

    result = json.loads((tmp_path / "paper/results/raidserve.json").read_text())
    shares, in_place = result["programs"]
    assert (shares["state"], in_place["state"], in_place["twice"]) == ("done", "done", "same")
    assert in_place["cpu_s"] > 0
    times = json.loads((tmp_path / "paper/results/twice.json").read_text())
    assert times["papers"]["raidserve"]["programs"] == result["programs"]
    rows = {row["exhibit"]: row for row in result["rows"]}
    assert len(rows) == len(exhibits.PAPERS["raidserve"].exhibits)
    assert result["run"]["commit"]
    assert "RaidServe: " in capsys.readouterr().out
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kvr"], "PAPER: got kvr; allowed: kvrs, lumen, raidserve, anchortp, kevlarflow, all"),
        (["kvrs", "--minutes", "0"], "--minutes: got 0; allowed: more than 0"),
        (["kvrs", "--minutes", "nan"], "--minutes: got nan; allowed: more than 0"),
        (["kvrs", "--quick", "--out", str(EXPERIMENTS)], "allowed for --quick"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["paper", *words])

    with pytest.raises(SystemExit, match="2"):
        command.main()

    assert said in capsys.readouterr().err


def test_without_a_name_the_papers_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With minutes, needs, and why a program cannot run here; nothing runs."""
    monkeypatch.setattr(sys, "argv", ["paper"])
    monkeypatch.delenv("DISTSERVE_HOME", raising=False)

    assert command.main() == 0

    said = capsys.readouterr().out
    for paper in PAPERS:
        assert f"{paper}: " in said
    for each in PROGRAMS:
        assert f"    {each.name} " in said
    assert "cannot run here: DISTSERVE_HOME is not set" in said
