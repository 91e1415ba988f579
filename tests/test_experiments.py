"""READMEs of experiments show the kept results."""

from pathlib import Path

import pytest

from experiments.readme import figures_not_kept, renewed, shown_in

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
READMES = sorted(EXPERIMENTS.glob("*/README.md"))


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_readmes_show_the_kept_results(path: Path) -> None:
    """To the letter; `python -m experiments.run_all --readme` puts them there."""
    readme = path.read_text()

    assert readme == renewed(readme, path.parent)
    assert figures_not_kept(readme) == []


def test_a_figure_beside_a_block_is_one_of_the_block(tmp_path: Path) -> None:
    """Figures of other sections, such as bars and settings, have no kept result."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results/a.txt").write_text("1,500 streams, p99 3.5 ms\n")
    block = "<!-- results: a.txt -->\n<!-- end of results -->\n"

    readme = renewed(f"# A\n\n20 runs.\n\n## Results\n\n{{}}\n\n{block}", tmp_path)

    assert shown_in(readme) == ["a.txt"]
    assert renewed(readme, tmp_path) == readme
    assert "```\n1,500 streams, p99 3.5 ms\n```\n" in readme
    assert (
        figures_not_kept(readme.format("All 1500 within 3.5 ms, `a[44]`, [45](46.md), p50.")) == []
    )
    assert figures_not_kept(readme.format("All 1,501 within 3.6 ms.")) == ["1501", "3.6"]
