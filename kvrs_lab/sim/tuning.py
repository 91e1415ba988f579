"""`kvrs lab tune`: a search for better settings with the simulator.

Optuna's TPE sampler (Bergstra et al., NeurIPS 2011) proposes values within a space, and each
proposal is simulated with the same seeds. The best proposal is compared with the configuration,
seed by seed, on a load that the search has not seen. A gain is shown if its interval excludes 0.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta
from rich.console import Console

from kvrs.config.document import dump_yaml, parse_yaml, yaml_fault
from kvrs.config.file import Config, checked, load_source
from kvrs.errors import ConfigError, KvrsError, check_extras
from kvrs.tables import output
from kvrs_lab.report.metrics import percentile
from kvrs_lab.report.student import Interval, interval
from kvrs_lab.sim.case import SimulateOptions, arrivals_of, faults_of, load_case
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.comparison import COMPLETE
from kvrs_lab.sim.goals import Goal
from kvrs_lab.sim.seeds import Simulated, simulate
from kvrs_lab.traces.formats import load_trace

_LOST_S = 60.0  # Pause of a stream that was not completed.

Value = str | int | float | bool | None


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers from `low` to `high`, both included; integers if both are."""

    low: float | int
    high: float | int
    log: bool = False


Choices = Annotated[list[Value], Meta(min_length=1)]
Space = dict[str, Choices | Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Options of the command line, beside those of a simulation."""

    space: Path
    goal: Goal
    trials: int = 30
    held_out_seeds: int = 10


@dataclass(frozen=True, slots=True)
class Tuned:
    values: dict[str, Value]  # Best values of the search, by setting.
    found: float  # Mean of the goal over the search's seeds.
    base: float  # Mean of the goal for the configuration.
    gain: Interval  # Gain on the held-out load; above 0: better.
    held_out_base: float

    @property
    def is_shown(self) -> bool:
        half = self.gain.half_width
        return half is not None and self.gain.mean - half > 0


def load_space(path: Path) -> Space:
    """Load a YAML file that maps settings to lists of values or spans.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--space: {path}: {error}") from None
    try:
        space = msgspec.convert(parse_yaml(text), Space)
    except yaml.YAMLError as error:
        raise ConfigError(f"--space: {yaml_fault(error, path)}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--space: {path}: {error}; allowed: for each setting a list of values, or low and high"
        ) from None
    wrong = [
        f"--space: {path}: {name}: got low {span.low} and high {span.high}"
        f"{', log: true' if span.log else ''}; allowed: low below high"
        f"{', above 0' if span.log else ''}"
        for name, span in space.items()
        if isinstance(span, Span) and not (span.low < span.high and (span.low > 0 or not span.log))
    ]
    if wrong or not space:
        raise ConfigError(wrong or f"--space: {path}: no settings; allowed: one or more")
    return space


def config_with(path: Path | None, values: Mapping[str, Value]) -> Config:
    """Load the configuration with these values.

    Raises:
        ConfigError: the changed configuration is wrong.
    """
    source = load_source(path, os.environ)
    source.document = source.document or {}
    for name, value in values.items():
        _put(source.document, name.split("."), value)
    return checked(source)


def _put(document: dict[str, Any], keys: Sequence[str], value: Value) -> None:
    for key in keys[:-1]:
        below = document.get(key)
        if not isinstance(below, dict):
            below = document[key] = {}
        document = below
    document[keys[-1]] = value


def ends_of(space: Space) -> list[dict[str, Value]]:
    """Combinations that contain each end and each choice once, to check the space."""
    first = {name: each.low if isinstance(each, Span) else each[0] for name, each in space.items()}
    rows: list[dict[str, Value]] = [dict(first)]
    for name, each in space.items():
        more = [each.high] if isinstance(each, Span) else each[1:]
        rows += [first | {name: value} for value in more]
    return rows


def cost(goal: Goal, simulated: Simulated, seed: int) -> float:
    """The goal's value for one seed; lower is better."""
    if goal is Goal.GOODPUT:
        return -float(simulated.clients[seed]["goodput_per_s"])
    return recovery_p99_s(simulated.by_seed[seed])


def recovery_p99_s(outcome: Outcome) -> float:
    """The p99 pause of recovered streams. A lost stream counts as a long pause."""
    lost = sum(outcome.ended.values()) - outcome.ended[COMPLETE]
    return percentile([*outcome.pauses_s, *[_LOST_S] * lost], 99) or 0.0


class Tuning:
    """One search."""

    def __init__(self, options: TuneOptions, case: SimulateOptions) -> None:
        """Raises ConfigError, TraceError: an option or a file is wrong."""
        check_extras("tune")
        if case.fault is None and not case.deaths and options.goal is Goal.RECOVERY_P99:
            raise ConfigError("--fault, --deaths: missing; allowed: one of them, to recover from")
        self._options = options
        self._space = load_space(options.space)
        _, self.faults = load_case(case)
        for values in ends_of(self._space):
            try:
                faults_of(case, config_with(case.config, values))
            except ConfigError as error:
                place = f"--space: {options.space}: "
                raise ConfigError([f"{place}{fault}" for fault in error.faults]) from None
        self._search, self._held_out = self._loads(case)
        self._known: dict[str, list[float]] = {}

    def _loads(self, case: SimulateOptions) -> tuple[SimulateOptions, SimulateOptions]:
        """The loads of the search and of the comparison: the second half of a trace, or other
        seeds.
        """
        options, later = self._options, case.seed + case.seeds
        held_out = replace(case, seed=later, seeds=options.held_out_seeds)
        if case.trace is not None:
            count = case.requests or len(load_trace(case.trace).requests)
            half = count // 2
            if half < 1:
                raise ConfigError(
                    f"--requests: got {count}; allowed: 2 or more, of which one half is held out"
                )
            case = replace(case, requests=half)
            held_out = replace(held_out, requests=count - half, first_request=half)
        for each in (case, held_out):
            arrivals_of(each, config_with(each.config, {}), each.seed)
        return case, held_out

    def run(self) -> Tuned:
        """Search, then compare.

        Raises:
            KvrsError: an invariant was violated.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Some options of its samplers are experimental.
            sampler = optuna.samplers.TPESampler(seed=self._search.seed, multivariate=True)
        study = optuna.create_study(sampler=sampler)
        base = fmean(self._costs({}, self._search, "the configuration"))
        study.optimize(
            lambda trial: fmean(
                self._costs(
                    {name: _suggested(trial, name, each) for name, each in self._space.items()},
                    self._search,
                    f"trial {trial.number + 1} of {self._options.trials}",
                )
            ),
            n_trials=self._options.trials,
        )
        best = dict(study.best_params)
        before = self._costs({}, self._held_out, "the configuration, held out")
        after = self._costs(best, self._held_out, "the best, held out")
        gain = interval([a - b for a, b in zip(before, after, strict=True)])
        assert gain is not None
        sign = self._options.goal.sign
        return Tuned(best, sign * study.best_value, sign * base, gain, sign * fmean(before))

    def _costs(self, values: Mapping[str, Value], load: SimulateOptions, title: str) -> list[float]:
        """Costs by seed, cached by values."""
        key = json.dumps([values, load.seed], sort_keys=True)
        if key not in self._known:
            config = config_with(load.config, values)
            found = simulate(load, config, self.faults, title)
            for seed, what in found.broken.items():
                raise KvrsError(f"seed {seed} violated an invariant with {dict(values)}: {what}")
            self._known[key] = [
                cost(self._options.goal, found, seed) for seed in sorted(found.by_seed)
            ]
        return self._known[key]


def _suggested(trial: Any, name: str, each: list[Value] | Span) -> Value:
    if not isinstance(each, Span):
        found: Value = trial.suggest_categorical(name, each)
    elif isinstance(each.low, int) and isinstance(each.high, int):
        found = int(trial.suggest_int(name, each.low, each.high, log=each.log))
    else:
        found = float(trial.suggest_float(name, each.low, each.high, log=each.log))
    return found


def run_tuning(options: TuneOptions, case: SimulateOptions) -> int:
    """Search; print the values as YAML if their gain is shown.

    Raises:
        ConfigError, TraceError, KvrsError: see `Tuning`.
    """
    tuned = Tuning(options, case).run()
    console = output()
    for line in _lines(options.goal, tuned):
        console.print(f"# {line}", markup=False, highlight=False, soft_wrap=True)
    if tuned.is_shown:
        text = dump_yaml(nested(tuned.values))
        console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)
    else:
        Console(stderr=True).print("no gain is shown: nothing to change", style="yellow")
    return 0


def nested(values: Mapping[str, Value]) -> dict[str, Any]:
    """Nest the values like a configuration file."""
    document: dict[str, Any] = {}
    for name, value in values.items():
        _put(document, name.split("."), value)
    return document


def _lines(goal: Goal, tuned: Tuned) -> list[str]:
    unit, half = goal.unit, tuned.gain.half_width
    spread = "" if half is None else f" ± {half:.4g}"
    gain = f"{tuned.gain.mean:+.4g}{spread}{unit} of {tuned.held_out_base:.4g}{unit}"
    verdict = f"gain {gain}" if tuned.is_shown else f"gain: none ({gain}, which may be noise)"
    return [
        f"{goal.value} in the search: {tuned.found:.4g}{unit}, was {tuned.base:.4g}{unit}",
        f"on the held-out load, {tuned.gain.n} seeds, 95 %: {verdict}",
    ]
