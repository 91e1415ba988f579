"""Twenty fixed situations of an interrupted stream, and what a policy decides in each of them; and
twenty of a hand-off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from kvrs.config.policy import Handoff, PolicyName, PolicySettings
from kvrs.core.model.agent import Agent
from kvrs.core.model.estimates import Estimate
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, StoredCheckpoint, Stream
from kvrs.core.routing import HandoffCandidate, choose_hand_off, hand_off_s
from kvrs.core.rules import BY_NAME
from kvrs.core.state import CoreSettings, State
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from kvrs.protocol.instance import Role, assumed_instance

PROFILE = "opt-13b-a100-distserve-tp1"
PROMPTS_TOKENS = (256, 1536)
LINKS_GBIT_PER_S = (10.0, 400.0)
PRODUCED_TOKENS = 100
VICTIMS = 10.0  # For each target.
_NOW_S = 0.1
_AHEAD_BYTES = 1 << 30
_QUEUE_S = 1.0
_SLOT_S = 0.5
_HOST_BYTES_PER_S = 26e9


@dataclass(frozen=True, slots=True)
class Situation:
    """A victim whose prompt's KV a prefill instance of another node retains."""

    prompt_tokens: int
    gbit_per_s: float  # Between the nodes.
    has_queue: bool = False  # Before the target, and before the prefill instance beside it.
    is_link_busy: bool = False
    has_slots: bool = True  # The target's are free.
    is_stored: bool = False  # An agent of the target's node has the whole history.

    @property
    def name(self) -> str:
        held_up = {
            "queue": self.has_queue,
            "busy link": self.is_link_busy,
            "no slot": not self.has_slots,
            "stored": self.is_stored,
        }
        what = [f"{self.prompt_tokens} tokens", f"{self.gbit_per_s:g} Gbit/s"]
        return ", ".join(what + [name for name, is_so in held_up.items() if is_so])


def situations() -> Iterator[Situation]:
    for prompt_tokens, gbit_per_s in product(PROMPTS_TOKENS, LINKS_GBIT_PER_S):
        plain = Situation(prompt_tokens, gbit_per_s)
        yield plain
        yield replace(plain, has_queue=True)
        yield replace(plain, is_link_busy=True)
        yield replace(plain, has_slots=False)
        yield replace(plain, is_stored=True)


def decided(name: PolicyName, situation: Situation) -> Estimate:
    """The choice at a target that has a prefill instance beside it."""
    settings = PolicySettings(name=name)
    state = State(CoreSettings(settings))
    view = state.view
    holder = view.add(_instance("p0", "n0", Role.PREFILL))
    prefill = view.add(_instance("p1", "n1", Role.PREFILL))
    target = view.add(_instance("d1", "n1", Role.DECODE))
    link = view.link(NodeId("n0"), NodeId("n1"))
    link.measure(situation.gbit_per_s / 8 * 1e9)
    stream = Stream(
        StreamId("victim"),
        0,
        situation.prompt_tokens,
        0.0,
        produced_tokens=PRODUCED_TOKENS,
        prefilled=True,
    )
    geometry = target.info.geometry
    size = geometry.page_size_tokens
    stream.holders[holder.id] = Holder(holder, situation.prompt_tokens // size)
    if situation.has_queue:
        for member in (prefill, target):
            member.note_queue(_QUEUE_S)
    if situation.is_link_busy:
        link.in_flight_bytes = _AHEAD_BYTES
    if not situation.has_slots:
        for number in range(settings.slots_max):
            state.slots.acquire(target.id, StreamId(f"other{number}"), 0.0, _SLOT_S)
    if situation.is_stored:
        agent = Agent(InstanceId("agent-n1"), NodeId("n1"), 1, 1 << 40, _HOST_BYTES_PER_S)
        pages = (situation.prompt_tokens + PRODUCED_TOKENS) // size
        stream.checkpoints[agent.id] = StoredCheckpoint(agent, geometry, pages=pages)
    view.look_ahead()
    rule = BY_NAME[name]
    estimates = rule.weigh(state, stream, [target], _NOW_S)
    return rule.decide(estimates, others=VICTIMS)


def _instance(name: str, node: str, role: Role) -> Member:
    geometry, table = catalog.kv_geometry(PROFILE), catalog.prefill_table(PROFILE)
    return Member.of(assumed_instance(InstanceId(name), NodeId(node), role, geometry), table)


def costs(name: PolicyName) -> dict[str, float | str]:
    """Predicted seconds to the next token by situation, and the options in the same order."""
    found = {each.name: decided(name, each) for each in situations()}
    seconds: dict[str, float | str] = {each: found[each].next_token_s for each in found}
    return seconds | {"options": " ".join(each.option.value for each in found.values())}


def hand_offs() -> dict[str, float | str]:
    """Seconds until the stream goes on, by `auto`, of those of `rom`, and where."""
    bytes_per_token = catalog.kv_geometry(PROFILE).bytes_per_token
    found: dict[str, float | str] = {}
    places = []
    for tokens, gbit_per_s, queue_s in product((512, 2048), LINKS_GBIT_PER_S, (0.0, 0.06, 0.3, 3)):
        rate = gbit_per_s / 8 * 1e9
        own = HandoffCandidate(InstanceId("d0"), queue_s, 300e9, is_near=True)
        other = HandoffCandidate(InstanceId("d1"), 0.0, rate, 1 << 28)
        for how in (Handoff.AUTO, Handoff.ROM):
            taken = choose_hand_off(how, own, [other], tokens * bytes_per_token, 0.005)
            places.append(str(taken.instance))
            name = f"{how.value}, {tokens} tokens, {gbit_per_s:g} Gbit/s, queue of {queue_s:g} s"
            found[name] = hand_off_s(how, taken, tokens * bytes_per_token, 0.005)
    return found | {"instances": " ".join(places)}
