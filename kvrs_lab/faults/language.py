"""The fault language: a YAML list of (when, what, whom).

    - when: {inflight_at_least: 8}            # the victim has at least 8 streams in flight
      what: kill                              # SIGKILL
      whom: {id: d0}
    - when: {at_s: 12.5, after_requests: 40}  # all named conditions must hold
      what: stop
      for_s: 3
      whom: {role: decode, pick: random}
    - when: {phase: handoff, in_phase_at_least: 2}
      what: link_cut
      for_s: 5
      whom: {link: [n0, n1]}
    - when: {at_s: 20, streams_at_least: 8}   # at least 8 streams depend on it
      what: kill
      whom: {role: agent, pick: busiest}
    - when: {at_s: 25}
      what: lose_device                       # a rank's process, and the memory of its KV
      whom: {id: d0, rank: 1}
    - when: {at_s: 30}
      what: kill                              # the host of a stage, with its ranks
      whom: {id: d0, stage: 1}

A cluster or the simulator carries out the faults of a list. `schedule.py` finds the due faults. See
`docs/guide/faults.md`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from kvrs.config.document import parse_yaml, yaml_fault
from kvrs.config.settings import Settings, echoed, reason_of
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import Role

NEAR_THE_END_TOKENS = 8


class What(StrEnum):
    # SIGKILL of the process; of an instance with worker processes, of these or of `workers` of
    # them. A rank's memory may outlive its process.
    KILL = "kill"
    LOSE_DEVICE = "lose_device"  # Kill a rank's or an instance's only process, with its memory.
    # Freeze for `for_s` (SIGSTOP, then SIGCONT): connections stay open, but nothing moves.
    STOP = "stop"
    SLOW = "slow"  # Run only 1/`factor` of the time, for `for_s`.
    # Limit the link between two nodes to `bytes_per_s` each way, for `for_s`.
    LINK_RATE = "link_rate"
    # Cut the link between two nodes for `for_s`, without any notification.
    LINK_CUT = "link_cut"
    # Flip one bit on the way in each of the next `pages` pages that the instance sends.
    CORRUPT_PAGE = "corrupt_page"


class Pick(StrEnum):
    BUSIEST = "busiest"  # Most streams in flight; ties by id.
    RANDOM = "random"
    ALL = "all"  # All victims that are up, at once.


class VictimRole(StrEnum):
    """The role of a victim: an instance by its role, or the agent of a node."""

    PREFILL = Role.PREFILL.value
    DECODE = Role.DECODE.value
    BOTH = Role.BOTH.value
    AGENT = "agent"


class Phase(StrEnum):
    """The phase of a stream, for the condition of a fault."""

    PREFILL = "prefill"  # The prompt is queued or computed at a prefill instance.
    HANDOFF = "handoff"  # The KV moves to decode: no token yet.
    DECODE = "decode"  # Between two tokens.
    NEAR_END = "near_end"  # At most 8 tokens are left.
    RECOVERY = "recovery"  # After a loss, before the first token of the next instance.


def phase_of(
    stage: str, output_tokens: int, max_tokens: int | None, recovers: bool = False
) -> Phase | None:
    """Return the phase of a stream at `stage` (prefill or decode); None: waiting for an instance.

    A stream without `max_tokens` is never near its end.
    """
    match stage:
        case "prefill" | "decode" if recovers:
            return Phase.RECOVERY
        case "prefill":
            return Phase.PREFILL
        case "decode" if output_tokens == 0:
            return Phase.HANDOFF
        case "decode":
            is_near = max_tokens is not None and max_tokens - output_tokens <= NEAR_THE_END_TOKENS
            return Phase.NEAR_END if is_near else Phase.DECODE
        case _:
            return None


class When(Settings):
    """The conditions of a fault: all given conditions must hold, and at least one must be given.

    Streams are counted at the victim.
    """

    # Since the start of the run.
    at_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    after_requests: int | None = Field(default=None, ge=1)  # Number of sent requests.
    # Streams that the victim works on; for an agent, its reservations.
    inflight_at_least: int | None = Field(default=None, ge=1)
    # Streams that depend on the victim's work or pages.
    streams_at_least: int | None = Field(default=None, ge=1)
    # Phase of streams that depend on the victim.
    phase: Phase | None = Field(default=None, strict=False)
    in_phase_at_least: int = Field(default=1, ge=1)  # Least number of streams in `phase`.

    @model_validator(mode="after")
    def _names_a_condition(self) -> "When":
        if "in_phase_at_least" in self.model_fields_set and self.phase is None:
            raise ValueError(
                "in_phase_at_least counts streams in a phase; allowed: only together with phase"
            )
        conditions = ("at_s", "after_requests", "inflight_at_least", "streams_at_least", "phase")
        if all(getattr(self, name) is None for name in conditions):
            raise ValueError(
                f"names no condition; allowed: at least one of {', '.join(conditions)}"
            )
        return self

    @property
    def label(self) -> str:
        """The given conditions as text."""
        named = self.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        return ", ".join(f"{name} {value}" for name, value in named.items())


class Whom(Settings):
    """The victims of a fault: an instance or agent by id; one or all of a role (within a node, if
    given); all of a node with its agent; or the link of two nodes.
    """

    id: InstanceId | None = Field(default=None, min_length=1, max_length=64)
    role: VictimRole | None = Field(default=None, strict=False)
    node: NodeId | None = Field(default=None, min_length=1, max_length=64)
    link: Annotated[list[NodeId], Field(min_length=2, max_length=2)] | None = None
    pick: Pick | None = Field(default=None, strict=False)  # Choice in `role`; default: busiest.
    seed: int | None = Field(default=None, ge=0)  # Seed of a random pick; default: the run's.
    # The rank of the instance to hit: its number, or a random rank.
    rank: Annotated[int, Field(ge=0, lt=1 << 16)] | Literal["random"] | None = None
    # The stage of the instance whose host is hit, also if the host belongs to another instance.
    stage: Annotated[int, Field(ge=0, lt=1 << 16)] | Literal["random"] | None = None

    @model_validator(mode="after")
    def _names_one_way(self) -> "Whom":
        named = [name for name in ("id", "role", "node", "link") if getattr(self, name) is not None]
        if len(named) != 1 and named != ["role", "node"]:
            got = " and ".join(named) or "none of them"
            raise ValueError(
                f"names {got}; allowed: exactly one of id, role, node and link, or role "
                f"and node together"
            )
        if self.pick is not None and self.role is None:
            raise ValueError("pick chooses within a role; allowed: only together with role")
        if self.seed is not None and self.pick is not Pick.RANDOM:
            raise ValueError(
                "seed is that of a random pick; allowed: only together with pick: random"
            )
        for part in ("rank", "stage"):
            if getattr(self, part) is None:
                continue
            if self.id is None and self.role is None:
                raise ValueError(
                    f"{part} is one of an instance's; allowed: only together with id or role"
                )
            if self.role is VictimRole.AGENT:
                raise ValueError(f"{part} is one of an instance's; allowed: no agent")
        if self.rank is not None and self.stage is not None:
            raise ValueError("names a rank and a stage; allowed: one of them")
        if self.link is not None and self.link[0] == self.link[1]:
            raise ValueError(f"link: got {self.link[0]!r} twice; allowed: two different nodes")
        return self

    @property
    def label(self) -> str:
        """The victim as text, before the choice."""
        if self.link is not None:
            return "-".join(self.link)
        named = f"all {self.role}" if self.pick is Pick.ALL else self.id or self.role or self.node
        if self.stage is not None:
            return f"{named} stage {self.stage}"
        return f"{named} rank {self.rank}" if self.rank is not None else str(named)


_PARAMETERS = {
    What.KILL: (),
    What.LOSE_DEVICE: (),
    What.STOP: ("for_s",),
    What.SLOW: ("factor", "for_s"),
    What.LINK_RATE: ("bytes_per_s", "for_s"),
    What.LINK_CUT: ("for_s",),
    What.CORRUPT_PAGE: ("pages",),
}
_OPTIONAL = {What.KILL: {"workers"}}
OF_A_LINK = (What.LINK_RATE, What.LINK_CUT)
_OF_RANKS = (What.KILL, What.LOSE_DEVICE, What.STOP, What.SLOW)
_OF_STAGES = (What.KILL, What.STOP, What.SLOW)


class Fault(Settings):
    when: When
    what: What = Field(strict=False)
    whom: Whom
    for_s: float | None = Field(default=None, gt=0, le=3600)
    factor: float | None = Field(default=None, gt=1, le=1000)
    bytes_per_s: float | None = Field(default=None, ge=1, le=1e15)
    pages: int | None = Field(default=None, ge=1, le=1_000_000)
    workers: int | None = Field(default=None, ge=1, le=1024)

    @model_validator(mode="after")
    def _is_whole(self) -> "Fault":
        names = ("for_s", "factor", "bytes_per_s", "pages", "workers")
        given = {name for name in names if getattr(self, name) is not None}
        wanted = _PARAMETERS[self.what]
        if given - _OPTIONAL.get(self.what, set()) != set(wanted):
            shown = ", ".join(sorted(given)) or "none"
            raise ValueError(
                f"{self.what} got the parameters: {shown}; allowed: exactly "
                f"{', '.join(wanted) or 'none'}"
            )
        if (self.what in OF_A_LINK) != (self.whom.link is not None):
            hits = (
                "the link of two nodes (whom: {link: [A, B]})"
                if self.what in OF_A_LINK
                else "instances, not a link"
            )
            raise ValueError(f"{self.what} hits {hits}")
        for part, allowed in (("rank", _OF_RANKS), ("stage", _OF_STAGES)):
            is_hit = getattr(self.whom, part) is not None
            if is_hit and (self.what not in allowed or self.workers is not None):
                raise ValueError(
                    f"{self.what} hits an instance, not a {part}; allowed with {part}: "
                    f"{', '.join(allowed)}, without workers"
                )
        if self.what is What.LOSE_DEVICE and (
            self.whom.role is VictimRole.AGENT or (self.whom.id is None and self.whom.role is None)
        ):
            raise ValueError(
                "lose_device hits an instance, or a rank of one; allowed: whom with id or role"
            )
        return self

    @property
    def label(self) -> str:
        """The fault with victim and conditions, for reports of faults that were never due."""
        return f"{self.what.value.replace('_', ' ')} {self.whom.label} ({self.when.label})"


_FAULTS: TypeAdapter[list[Fault]] = TypeAdapter(
    Annotated[list[Fault], Field(min_length=1, max_length=10_000)]
)
_KEYS = {"when": When.model_fields, "whom": Whom.model_fields}


def load_faults(path: Path) -> list[Fault]:
    """Read and check a file of faults.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has mistakes, a line for each.
    """
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(yaml_fault(error, path)) from None
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
    path = (
        "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in mistake["loc"]
        ).lstrip(".")
        or "the file"
    )
    if mistake["type"] == "extra_forbidden":
        parents = [part for part in mistake["loc"][:-1] if isinstance(part, str)]
        allowed = _KEYS[parents[-1]] if parents else Fault.model_fields
        return f"{path}: unknown key; allowed: {', '.join(sorted(allowed))}"
    if mistake["type"] == "missing":
        return f"{path}: missing"
    message = reason_of(mistake)
    if mistake["type"] == "value_error":
        return f"{path}: {message}"
    value = mistake["input"]
    shown = echoed(value)
    if mistake["type"] in ("list_type", "model_type"):
        shown = "nothing" if value is None else shown
        wanted = (
            "a list of faults"
            if not mistake["loc"]
            else "a section"
            if mistake["type"] == "model_type"
            else "a list"
        )
        return f"{path}: got {shown}; allowed: {wanted}"
    return f"{path}: got {shown}; {message[0].lower()}{message[1:]}"
