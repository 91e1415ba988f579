"""Every experiment as data: its program and options, the results that it keeps, its minutes, what
it needs, and its quick form.

`PAPERS` has those behind the exhibits of each of the five papers, which `experiments/paper` runs;
`OTHERS` the rest. `experiments/run_all.py` lists all of them.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from experiments.kills.drill import TRACE as CONVERSATIONS
from experiments.raidserve.throughput import DEFAULT_TRACE as AVAILABILITY_TRACE
from experiments.record import ROOT, gpus
from experiments.results import KEPT, state

EXPERIMENTS = ROOT / "experiments"


@dataclass(frozen=True, slots=True)
class Need:
    """Something that not every machine has; `missing` says why this one has not."""

    name: str
    missing: Callable[[], str | None]


def _variable(name: str, what: str) -> Need:
    return Need(name, lambda: None if name in os.environ else f"{name} is not set: {what}")


def _file_missing(path: Path) -> str | None:
    return None if path.is_file() else f"no file {path.name}"


def _namespaces_missing() -> str | None:
    """The reason why there are none, as far as it shows without making one."""
    if os.geteuid():
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


TRACE = Need("trace", lambda: _file_missing(CONVERSATIONS))
AVAILABILITY = Need("availability trace", lambda: _file_missing(AVAILABILITY_TRACE))
DISTSERVE = _variable("DISTSERVE_HOME", "a checkout of DistServe")
SPLITWISE = _variable("SPLITWISE_HOME", "a checkout of splitwise-sim")
VLLM = _variable("KVRS_VLLM_PYTHON", "the interpreter of an environment with vLLM")
SGLANG = _variable("KVRS_SGLANG_PYTHON", "the interpreter of an environment with SGLang")
KUBERNETES = _variable("KUBECONFIG", "the file of an API server of Kubernetes without machines")
BEFORE = _variable("KVRS_BEFORE", "another checkout, to compare with")
NAMESPACES = Need("network namespaces", _namespaces_missing)
AGENTS = Need("agents", lambda: _file_missing(ROOT / ".venv-agents" / "bin" / "python"))
GPU = Need("a GPU", lambda: None if gpus() else "no NVIDIA GPU is here")


@dataclass(frozen=True, slots=True)
class Quick:
    """The same program with fewer seeds, sizes or rounds."""

    minutes: float
    command: str


@dataclass(frozen=True, slots=True)
class Experiment:
    """A command, and the results that it keeps in `FOLDER/results`."""

    folder: str
    results: tuple[str, ...]  # Without the suffix; of one directory.
    minutes: float
    command: str  # Empty: the script is gone.
    needs: tuple[Need, ...] = ()
    quick: Quick | None = None
    is_virtual: bool = False  # Two runs print the same figures.

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.results[0]}"

    @property
    def paths(self) -> list[Path]:
        return self.paths_in(EXPERIMENTS)

    def paths_in(self, root: Path) -> list[Path]:
        """The results in a directory that is laid out like experiments/."""
        return [root / self.folder / "results" / f"{name}.json" for name in self.results]

    def state(self) -> str:
        """The state of the first result that is not simply kept."""
        states = [state(path) for path in self.paths]
        return next((found for found in states if found != KEPT), KEPT)

    def missing(self) -> list[str]:
        if not self.command:
            return ["the script is gone; it lies at the commit of the result"]
        return [why for need in self.needs if (why := need.missing())]

    def words(self, root: Path = EXPERIMENTS, *, is_quick: bool = False) -> list[str]:
        """The command line that keeps the results below this directory."""
        command = self.quick.command if is_quick and self.quick else self.command
        line = os.path.expandvars(command).replace("python -m ", f"{sys.executable} -m ")
        return [*shlex.split(line), "--out", str(self.paths_in(root)[0].parent)]


def _of(
    folder: str,
    result: str,
    minutes: float,
    words: str = "run",
    *needs: Need,
    quick: tuple[float, str] | None = None,
    is_virtual: bool = False,
) -> Experiment:
    """A module of the folder with its options, that keeps one result; `quick` has the minutes and
    the words of its quick form.
    """
    module = f"python -m experiments.{folder}."
    short = Quick(quick[0], f"{module}{quick[1]}") if quick else None
    return Experiment(
        folder, (result,), minutes, f"{module}{words}", needs, short, is_virtual=is_virtual
    )


# In the order in which they are run: first what is computed or in virtual time.
PAPERS: Mapping[str, tuple[Experiment, ...]] = {
    "kvrs": (
        _of("request_path", "decision", 1, "decision", quick=(0.2, "decision --rounds 200")),
        _of(
            *("link_monitor", "simulated", 1, "simulated"),
            quick=(0.2, "simulated --seeds 1"),
            is_virtual=True,
        ),
        _of(
            *("load_skew", "simulated", 4, "simulated"),
            quick=(0.4, "simulated --rates 4.2 --seeds 10"),
            is_virtual=True,
        ),
        _of(
            *("decisions", "study", 5, "study"),
            quick=(1.0, "study --quick"),
            is_virtual=True,
        ),
        _of("decisions", "embedded", 9, "embedded", quick=(2.5, "embedded --quick")),
        _of("decisions", "vllm", 25, "vllm", VLLM, quick=(5, "vllm --quick")),
        _of(
            *("decisions", "rates", 1, "rates"),
            quick=(0.2, "rates --quick"),
            is_virtual=True,
        ),
        _of("two_proxies", "two_proxies", 2, quick=(0.3, "run --streams 60 --tokens 100")),
        _of("healthy_path", "healthy_path", 2, quick=(0.5, "run --pairs 4 --seconds 4")),
        _of("crossover", "crossover", 5, quick=(1.3, "run --repeats 2")),
        _of("crossover", "hand_off", 4, "hand_off", quick=(0.8, "hand_off --repeats 2")),
        _of("load_skew", "load_skew", 22, quick=(1.9, "run --shares 90 --repeats 1 --seconds 30")),
        _of(
            *("load_skew", "rates", 55, "rates --repeats 10 --limit-s 3600"),
            quick=(1.1, "rates --rates 4.1 4.3 --repeats 1 --seconds 12"),
        ),
        _of(
            *("load_skew", "one_rate", 28, "rates --rates 4.2 --repeats 20 --limit-s 1800"),
            quick=(0.5, "rates --rates 4.2 --repeats 1 --seconds 6"),
        ),
        _of(
            *("link_monitor", "computed", 18, "computed", NAMESPACES),
            quick=(3, "computed --rates 2 --lengths 512 --profile-tokens 512"),
        ),
        _of("crossover", "distserve", 6, "run --distserve --repeats 5", DISTSERVE),
        _of("crossover", "hand_off_distserve", 4, "hand_off --distserve", DISTSERVE),
        _of("load_skew", "distserve", 12, "run --distserve --repeats 1", DISTSERVE),
        _of("load_skew", "distserve_rates", 15, "rates --distserve --seconds 20", DISTSERVE),
    ),
    "lumen": (
        _of("lumen", "placement", 1, "placement", quick=(0.2, "placement"), is_virtual=True),
        _of(
            *("lumen", "loads", 60, "paper --exhibits B.2 B.3 --jobs 2"),
            quick=(1, "paper --exhibits B.2 --cases 10x1:1.2 --seeds 1 --jobs 2"),
            is_virtual=True,
        ),
        _of(
            *("lumen", "sizes", 200, "paper --exhibits B.4 B.5 --jobs 2"),
            quick=(1, "paper --exhibits B.5 --cases 8x1 --seeds 1 --jobs 2"),
            is_virtual=True,
        ),
        _of(
            *("lumen", "sizes_to_16", 30),
            "paper --exhibits B.4 B.5 --cases 4x1 8x2 8x1 16x1 --keep sizes_to_16 --jobs 2",
            quick=(
                0.5,
                "paper --exhibits B.4 --cases 4x1 --keep sizes_to_16 --seeds 1 --jobs 2",
            ),
            is_virtual=True,
        ),
        _of(
            *("lumen", "ten_workers", 15),
            "paper --exhibits B.1 B.6 B.7 --jobs 2",
            quick=(0.7, "paper --exhibits B.1 --seeds 1 --jobs 2"),
            is_virtual=True,
        ),
        _of(
            *("lumen", "prototype", 60),
            "paper --exhibits A.1 A.4 --cases 8x1 8x2 8x4 --jobs 2",
            quick=(1.5, "paper --exhibits A.1 --cases 8x1 --seeds 1 --jobs 2"),
            is_virtual=True,
        ),
        _of(
            *("lumen", "prototype_rates", 60),
            "paper --exhibits A.3 --keep prototype_rates --jobs 2",
            quick=(
                1,
                "paper --exhibits A.3 --cases 8x1:1 --keep prototype_rates --seeds 1 --jobs 2",
            ),
            is_virtual=True,
        ),
        _of(
            *("lumen", "prototype_four", 20),
            "paper --exhibits A.1 --cases 4x1 --keep prototype_four --jobs 2",
            quick=(
                2.5,
                "paper --exhibits A.1 --cases 4x1 --keep prototype_four --seeds 1 --jobs 2",
            ),
            is_virtual=True,
        ),
        _of(
            "lumen",
            "recovery",
            60,
            "recovery --limit-s 3400",
            quick=(4, "recovery --cases 4x1 --repeats 1"),
        ),
        _of(
            "lumen",
            "processes",
            60,
            "processes",
            quick=(4, "processes --cases 4x1 --seeds 1 --requests 30"),
        ),
        _of("checkpoint_cost", "checkpoint_cost", 10, quick=(1, "run --rounds 10 --kills 2")),
    ),
    "raidserve": (
        _of("raidserve", "shares", 1, "shares", quick=(0.1, "shares --rounds 200")),
        _of(
            *("raidserve", "lengths", 1, "lengths", TRACE),
            quick=(0.2, "lengths --samples 100"),
            is_virtual=True,
        ),
        _of("raidserve", "in_place", 1, "in_place", quick=(0.2, "in_place"), is_virtual=True),
        _of(
            *("raidserve", "throughput", 2, "throughput", AVAILABILITY),
            quick=(0.5, "throughput --seeds 1"),
            is_virtual=True,
        ),
        _of(
            *("raidserve", "peaks", 8, "peaks --jobs 2", TRACE),
            quick=(0.8, "peaks --seeds 1 --jobs 2"),
            is_virtual=True,
        ),
        _of(
            *(
                "raidserve",
                "curves",
                8,
                "curves --jobs 2 --seeds 1",
                TRACE,
            ),  # In full one seed, too.
            quick=(1.2, "curves --jobs 2 --seeds 1"),
            is_virtual=True,
        ),
        _of(
            *("raidserve", "rank_balance", 7, "rank_balance"),
            quick=(0.8, "rank_balance --sequences 8 --steps 2 --context 64"),
        ),
        _of(
            *("raidserve", "computed", 40, "computed --limit-s 2300"),
            quick=(5.8, "computed --repeats 1"),
        ),
        _of("gpu", "attention", 5, "attention", GPU, quick=(1, "attention")),
    ),
    "anchortp": (
        _of("anchortp", "plans", 1, "plans", quick=(0.1, "plans"), is_virtual=True),
        _of("experts", "simulated", 1, "simulated", quick=(0.3, "simulated"), is_virtual=True),
        _of("experts", "degrees", 1, "degrees", quick=(0.3, "degrees"), is_virtual=True),
        _of("experts", "fitted", 2, "fitted", quick=(0.2, "fitted"), is_virtual=True),
        _of(
            *("anchortp", "degrees", 20, "degrees --jobs 2"),
            quick=(0.5, "degrees --models Qwen3-32B --seeds 1 --jobs 2"),
            is_virtual=True,
        ),
        _of(
            "anchortp",
            "planners",
            1,
            "run --part planners",
            quick=(0.4, "run --part planners --quick"),
        ),
        _of(
            *("anchortp", "recovery", 25),
            quick=(1.1, "run --quick --requests 16 --disk-bytes-per-s 1e6"),
        ),
        _of("anchortp", "in_place", 13, "in_place", quick=(0.8, "in_place --streams 100")),
        _of(
            *("experts", "cpu", 17, "cpu --steps 30 --seeds 3 --rows 128"),
            quick=(1, "cpu --tiny --steps 2 --rows 32 --skews 1"),
        ),
        _of(
            *("experts", "lost_ranks", 60, "lost_ranks"),
            quick=(4.3, "lost_ranks --tiny --repeats 1 --requests 40 --gap-s 8"),
        ),
    ),
    "kevlarflow": (
        _of(
            *("pipelines", "table1", 60, "table1 --jobs 2"),
            quick=(0.2, "table1 --scenes 1 --rates 2 --jobs 2"),
            is_virtual=True,
        ),
        _of(
            *("pipelines", "knees", 2, "knees --jobs 2"),
            quick=(0.5, "knees --nodes 8 --jobs 2"),
            is_virtual=True,
        ),
        _of("pipelines", "capacity", 9, "capacity", quick=(1.9, "capacity --rates 2 --load-s 8")),
        _of("pipelines", "replication", 15, "replication", quick=(1.2, "replication --rounds 4")),
        _of(
            *("pipelines", "replication-hosts", 2, "replication --hosts --rounds 4"),
            quick=(1, "replication --hosts --rounds 2"),
        ),
    ),
}

_MEASURED_ONCE = sorted(
    path.stem for path in (EXPERIMENTS / "measured_once/results").glob("*.json")
)

# Places that the reader of the kept drawing found unclear.
_UNCLEAR = "4,6,7,9,11,13,17,19,22,25,26,27,33"

OTHERS = (
    _of("lumen", "fit", 10, "fit", is_virtual=True),
    _of(
        *("lumen", "four_workers", 5),
        "paper --exhibits B.4 --cases 4x1 --keep four_workers --jobs 2",
        is_virtual=True,
    ),
    _of(
        *("lumen", "eight_workers", 4),
        "paper --exhibits B.5 --cases 8x1 --keep eight_workers --jobs 2",
        is_virtual=True,
    ),
    _of("lumen", "beside_prompts", 0.2, "beside_prompts", is_virtual=True),
    _of("request_path", "gauge", 1, "gauge"),
    _of("request_path", "chat", 3, "chat --rounds 36", BEFORE),
    _of("request_path", "size", 1, "size"),
    _of("request_path", "places", 1, f"places --seed 31129 --unclear {_UNCLEAR}"),
    _of("healthy_path", "paced/healthy_path", 3, "run --paced --pairs 10 --tokens 200"),
    _of("bench_proxy", "bench_proxy", 15),
    _of("bench_proxy", "lockstep", 4, "lockstep"),
    _of("bench_proxy", "background", 3, "background"),
    _of("speculation", "exact", 20, "exact"),
    _of("speculation", "acceptance", 19, "acceptance"),
    _of("speculation", "gain", 16, "gain --pairs 4"),
    _of("speculation", "steps", 7, "steps"),
    _of("pipelines", "series-wait", 8, "series"),
    _of("pipelines", "series", 8, "series --group"),
    _of("pipelines", "series-ring", 4, "series --group --ring --streams 220 --seed 11"),
    _of("prefix_placement", "prefix_placement", 70, "run --seeds 4 --limit-s 7200", TRACE),
    _of("prefix_placement", "agents", 15, "agents", TRACE),
    _of("prefix_placement", "costs", 1, "costs"),
    _of("prefix_placement", "engines", 5, "engines"),
    _of("hostile_engine", "hostile_engine", 2),
    _of("notice", "notice", 4),
    _of("notice", "starved", 4, "run --spinning 4"),
    _of("kills", "simulated", 4, "run decode simulated"),
    _of("kills", "decode", 3, "run decode embedded"),
    _of("kills", "decode-trace", 3, "run decode embedded --load trace", TRACE),
    _of("kills", "rank", 10, "run rank embedded"),
    _of("kills", "rank-on-nodes", 10, "run rank embedded --on-nodes"),
    _of("kills", "rank-experts", 5, "run rank embedded --experts"),
    _of("kills", "everything", 10, "run everything embedded"),
    _of("kills", "proxy", 5, "run proxy embedded"),
    _of("kills", "proxy-sync", 5, "run proxy embedded --mirror sync"),
    _of("kills", "proxy-3", 5, "run proxy embedded --proxies 3"),
    _of("kills", "proxy-3-sync", 5, "run proxy embedded --proxies 3 --mirror sync"),
    _of("kills", "proxy-mix", 10, "run proxy embedded --mix --kills 40"),
    _of("kills", "proxy-responses", 6, "run proxy embedded --api responses"),
    _of("kills", "proxy-mix-messages", 6, "run proxy embedded --api messages --mix --kills 40"),
    _of("kills", "worlds", 10, "run everything simulated --seed 0"),
    _of("kills", "poison", 3, "run poison simulated"),
    _of("soak", "soak", 125, "run", quick=(11, "run --minutes 10")),
    _of("simulator", "queueing", 5, "queueing"),
    _of("simulator", "speed", 2, "speed"),
    _of("simulator", "distserve", 5, "distserve", DISTSERVE),
    _of("simulator", "splitwise", 5, "splitwise", SPLITWISE),
    _of("simulator", "cluster", 2, "cluster"),
    _of("simulator", "scale", 6, "scale"),
    _of("simulator", "scale_at_most", 60, "scale --cases 4000x100 --at-most"),
    _of("simulator", "limits", 6, "limits"),
    _of("kills", "distserve", 5, "run everything distserve", DISTSERVE),
    _of("kills", "distserve-both", 5, "run everything distserve --backup both", DISTSERVE),
    *(
        _of("kills", f"distserve-{way}", 5, f"run everything distserve --policy {way}", DISTSERVE)
        for way in ("rom", "always_migrate", "always_recompute")
    ),
    _of(
        *("kills", "distserve-always_restore-both", 5),
        *("run everything distserve --policy always_restore --backup both", DISTSERVE),
    ),
    _of("kills", "vllm", 15, "run decode vllm", VLLM),
    _of("kills", "vllm-replay", 10, "run decode vllm --replays --kills 50", VLLM),
    _of("kills", "vllm-forced", 10, "run decode vllm --replays --forced --kills 30", VLLM),
    _of(
        *("kills", "vllm-replay-stock", 10, "run decode vllm --replays --stock --kills 30", VLLM),
    ),
    _of("kills", "vllm-thoughts", 6, "run decode vllm --replays --thoughts --kills 40", VLLM),
    _of(
        *("kills", "vllm-thoughts-stock", 6),
        *("run decode vllm --replays --thoughts --stock --kills 45", VLLM),
    ),
    _of("kills", "vllm-replay-targets", 20, "run decode vllm --targets --kills 15", VLLM),
    _of("kills", "vllm-recompute", 48, "run decode vllm --option recompute --kills 100", VLLM),
    _of("kills", "vllm-migrate", 60, "run decode vllm --option migrate --kills 100", VLLM),
    _of("kills", "sglang-forced", 6, "run decode sglang --kills 18", SGLANG),
    _of("kills", "sglang-thoughts", 4, "run decode sglang --thoughts --kills 10", SGLANG),
    _of("vllm_rows", "vllm_rows", 100, "run --limit-s 6000", VLLM),
    _of("vllm_rows", "agent/vllm_rows", 10, "run --kind agent", VLLM),
    _of("vllm_rows", "nixl/vllm_rows", 40, "run --nixl", VLLM),
    _of("vllm_rows", "ring", 15, "ring"),
    _of("vllm_rows", "ring_of_vllm", 12, "ring --real --kills 10", VLLM),
    _of("vllm_rows", "damaged", 6, "damaged"),
    _of("vllm_rows", "damaged_of_vllm", 25, "damaged --real", VLLM),
    _of("vllm_rows", "checksums", 2, "checksums"),
    _of("vllm_rows", "flood", 2, "flood"),
    _of("sglang_pairs", "pairs", 60, "run --limit-s 3600", SGLANG),
    _of("sglang_pairs", "scripted", 1, "scripted"),
    _of("aborted_transfers", "vllm", 12, "run vllm", VLLM, NAMESPACES),
    _of("aborted_transfers", "sglang", 12, "run sglang", SGLANG, NAMESPACES),
    _of("sglang_restore", "sglang_restore", 12, "run", SGLANG),
    _of("sglang_restore", "ranks/sglang_restore", 6, "run --ranks 2 --rounds 3", SGLANG),
    _of("checkpoint_cost", "vllm", 20, "vllm", VLLM),
    _of("gpu", "plane", 8, "plane", GPU),
    _of("beside", "beside", 12, "run --only kvrs dynamo vllm-router smg", NAMESPACES),
    _of("beside", "litellm/beside", 7, "run --quick --only litellm", NAMESPACES),
    _of("dynamo_cascade", "dynamo_cascade", 7, "run", NAMESPACES, TRACE),
    _of("demo_vllm", "demo_vllm", 4, "run", VLLM),
    _of("vllm_scheduler", "vllm_scheduler", 2, "run", VLLM),
    _of("first_minutes", "demo", 3, "demo"),
    _of("first_minutes", "vllm", 4, "vllm", VLLM),
    _of("first_minutes", "scripted", 1, "vllm --scripted"),
    _of("field_requests", "field_requests", 4),
    _of("signs_of_life", "signs_of_life", 6),
    _of("agent_tasks", "agent_tasks", 20, "run", AGENTS),
    _of("other_weights", "other_weights", 8, quick=(1, "run --quick")),
    _of("other_weights", "vllm", 15, "vllm", VLLM),
    _of("parsed_deaths", "parsed_deaths", 8, quick=(0.5, "run --quick")),
    _of(
        *("parsed_deaths", "near_ties", 6, "run --differ 0.002 --deaths 1000"),
        quick=(0.5, "run --differ 0.002 --quick"),
    ),
    _of("parsed_deaths", "price", 5, "price", quick=(0.5, "price --quick")),
    _of("kill_spread", "kill_spread", 5, quick=(0.5, "run --quick")),
    Experiment("kill_spread", ("before",), 0, ""),
    _of(
        *("decisions", "learning", 12, "learning"),
        quick=(2.0, "learning --quick"),
        is_virtual=True,
    ),
    _of("decisions", "guesses", 1, "guesses", is_virtual=True),
    _of("decisions", "burst", 1, "burst --beside $KVRS_BEFORE", BEFORE),
    Experiment("decisions", ("before", "rates_before"), 0, ""),
    _of("proxy_rolls", "proxy_rolls", 8),
    _of("row_pull", "row_pull", 2, "measure"),
    _of("kubernetes_api", "kubernetes_api", 4, "run", KUBERNETES),
    Experiment("measured_once", tuple(_MEASURED_ONCE), 0, ""),
)

ALL = (*chain.from_iterable(PAPERS.values()), *OTHERS)
