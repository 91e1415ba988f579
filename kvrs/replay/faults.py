"""The language of faults: a YAML list of (when, what, whom), and which of them are due.

    - when: {inflight_at_least: 8}            # the victim has at least 8 streams in flight
      what: kill                              # SIGKILL
      whom: {id: d0}
    - when: {at_s: 12.5, after_requests: 40}  # all named conditions must hold
      what: kill
      whom: {role: decode, pick: busiest}

This module only says what is due and whom it hits, from a given state; carrying it out is the cluster's work.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.settings import Settings


class What(StrEnum):
    KILL = "kill"  # SIGKILL: no goodbye, no flush.


class Pick(StrEnum):
    BUSIEST = "busiest"  # Most streams in flight; of equals the first by id.
    RANDOM = "random"


class When(Settings):
    """Every condition that is named must hold; at least one must be named."""

    at_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # Since the start of the run.
    after_requests: int | None = Field(default=None, ge=1)  # So many requests were sent.
    inflight_at_least: int | None = Field(default=None, ge=1)  # Streams in flight at the victim.

    @model_validator(mode="after")
    def _names_a_condition(self) -> "When":
        if self.at_s is None and self.after_requests is None and self.inflight_at_least is None:
            raise ValueError("names no condition; allowed: at least one of at_s, after_requests, inflight_at_least")
        return self


class Whom(Settings):
    """One instance by id, or one of a role."""

    id: InstanceId | None = Field(default=None, min_length=1, max_length=64)
    role: Role | None = Field(default=None, strict=False)
    pick: Pick | None = Field(default=None, strict=False)  # With `role`; without it the busiest.

    @model_validator(mode="after")
    def _names_one_way(self) -> "Whom":
        if (self.id is None) == (self.role is None):
            raise ValueError("allowed: exactly one of id and role")
        if self.pick is not None and self.role is None:
            raise ValueError("pick chooses within a role; allowed: only together with role")
        return self


class Fault(Settings):
    when: When
    what: What = Field(strict=False)
    whom: Whom


_FAULTS: TypeAdapter[list[Fault]] = TypeAdapter(Annotated[list[Fault], Field(min_length=1, max_length=10_000)])
_KEYS = {"when": When.model_fields, "whom": Whom.model_fields}


def load_faults(path: Path) -> list[Fault]:
    """Read and check a file of faults.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds mistakes: one line for each, all at once.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from None
    try:
        return parse_faults(document)
    except ConfigError as error:
        raise ConfigError([f"{path}: {line}" for line in error.faults]) from None


def parse_faults(document: Any) -> list[Fault]:
    """Check a parsed YAML document; ConfigError has one line per mistake."""
    try:
        return _FAULTS.validate_python(document)
    except ValidationError as error:
        raise ConfigError([_line(mistake) for mistake in error.errors(include_url=False)]) from None


def _line(mistake: Any) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in mistake["loc"]).lstrip(".") or "the file"
    if mistake["type"] == "extra_forbidden":
        parents = [part for part in mistake["loc"][:-1] if isinstance(part, str)]
        allowed = _KEYS[parents[-1]] if parents else Fault.model_fields
        return f"{path}: unknown key; allowed: {', '.join(sorted(allowed))}"
    if mistake["type"] == "missing":
        return f"{path}: missing"
    message = mistake["msg"].removeprefix("Value error, ")
    if mistake["type"] == "value_error":
        return f"{path}: {message}"
    value = mistake["input"]
    shown = "a section" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
    return f"{path}: got {shown}; {message[0].lower()}{message[1:]}"


@dataclass(frozen=True, slots=True)
class DueFault:
    fault: Fault
    whom: InstanceId
    inflight: int  # Streams that were in flight at the victim when it became due.


class FaultSchedule:
    """Says which faults are due. Each is due once; one whose victim is not up waits until it is."""

    def __init__(self, faults: list[Fault], seed: int) -> None:
        self._pending = list(faults)
        self._rng = random.Random(seed)

    @property
    def pending(self) -> tuple[Fault, ...]:
        return tuple(self._pending)

    def due(
        self,
        elapsed_s: float,
        requests_sent: int,
        inflight: Mapping[InstanceId, int],
        roles: Mapping[InstanceId, Role],
    ) -> list[DueFault]:
        """The faults to carry out now, in the order of the file.

        Args:
            elapsed_s: since the start of the run.
            requests_sent: so far.
            inflight: streams in flight at every instance that is up; instances that are not up are left out.
            roles: of at least those instances.
        """
        due: list[DueFault] = []
        for fault in list(self._pending):
            if not _time_has_come(fault.when, elapsed_s, requests_sent):
                continue
            # One instance dies once: two faults of the same moment have two victims.
            hit = {other.whom for other in due}
            enough = fault.when.inflight_at_least or 0
            fitting = [
                instance
                for instance in sorted(inflight)
                if instance not in hit and inflight[instance] >= enough and _is_meant(fault.whom, instance, roles[instance])
            ]
            if fitting:
                victim = self._choose(fault.whom, fitting, inflight)
                due.append(DueFault(fault, victim, inflight[victim]))
                self._pending.remove(fault)
        return due

    def _choose(self, whom: Whom, fitting: list[InstanceId], inflight: Mapping[InstanceId, int]) -> InstanceId:
        if whom.pick is Pick.RANDOM:
            return self._rng.choice(fitting)
        return max(fitting, key=lambda instance: inflight[instance])


def _time_has_come(when: When, elapsed_s: float, requests_sent: int) -> bool:
    return elapsed_s >= (when.at_s or 0.0) and requests_sent >= (when.after_requests or 0)


def _is_meant(whom: Whom, instance: InstanceId, role: Role) -> bool:
    return whom.id == instance if whom.id is not None else role in (whom.role, Role.BOTH)
