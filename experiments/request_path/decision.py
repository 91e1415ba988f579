"""How long one decision takes: all options of one victim at one target, at several history lengths.

Timed is what the policy does per victim and target: look the holder's and the link's books up,
predict migration, its split and recompute from the tables, choose. The lengths take turns within
one run, so that a busy moment hits all of them.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.policy import PolicyName, PolicySettings
from kvrs.core.model.estimates import Estimate
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, Stream
from kvrs.core.rules import BY_NAME
from kvrs.core.state import CoreSettings, State
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from kvrs.protocol.instance import Role, assumed_instance

# One with a table by length alone, one with a table in two dimensions.
PROFILES = ("opt-13b-a100-distserve-tp1", "llama-3.1-70b-a100-vllm-tp4")
LENGTHS_TOKENS = (512, 100_000)
PRODUCED_TOKENS = 100
LIMIT_US = 5.0
OTHERS = 10.0  # Victims for each target, as when an instance with many streams is lost.
BUDGET_S = 3600.0  # Is checked, and met at every length: an abort would be another, shorter answer.


def one_decision(profile: str, name: PolicyName, history_tokens: int) -> Callable[[], Estimate]:
    """A decision on the survivors of a two-node cluster, with a slot book and a link that are in
    use.
    """
    settings = PolicySettings(name=name)
    state = State(CoreSettings(settings))
    view, slots = state.view, state.slots
    holder = view.add(_instance(profile, "p0", "n0", Role.PREFILL))
    view.add(_instance(profile, "p1", "n1", Role.PREFILL))
    target = view.add(_instance(profile, "d1", "n1", Role.DECODE))
    stream = Stream(
        StreamId("victim"),
        0,
        history_tokens - PRODUCED_TOKENS,
        0.0,
        produced_tokens=PRODUCED_TOKENS,
        prefilled=True,
    )
    stream.holders[holder.id] = Holder(
        holder, stream.prompt_tokens // holder.abilities.page_size_tokens
    )
    for n in range(
        settings.slots_max
    ):  # All slots taken: a denial's expected wait is part of the decision.
        slots.acquire(target.id, StreamId(f"other{n}"), 0.0, 0.5)
    view.link(NodeId("n0"), NodeId("n1")).in_flight_bytes = 1 << 30
    targets, rule = [target], BY_NAME[name]

    def decision() -> Estimate:
        return rule.decide(rule.weigh(state, stream, targets, 0.1), BUDGET_S, OTHERS)

    return decision


def _instance(profile: str, name: str, node: str, role: Role) -> Member:
    geometry, table = catalog.kv_geometry(profile), catalog.prefill_table(profile)
    return Member.of(assumed_instance(InstanceId(name), NodeId(node), role, geometry), table)


def measure(profile: str, rounds: int, calls: int) -> dict[str, dict[int, list[float]]]:
    """Microseconds per decision by policy and length; each figure is the mean of `calls` decisions
    in a row.
    """
    decisions = {
        (name.value, length): one_decision(profile, name, length)
        for name in PolicyName
        for length in LENGTHS_TOKENS
    }
    samples: dict[str, dict[int, list[float]]] = {
        name.value: {length: [] for length in LENGTHS_TOKENS} for name in PolicyName
    }
    for _ in range(rounds):
        for (name, length), decision in decisions.items():
            start_ns = time.perf_counter_ns()
            for _ in range(calls):
                decision()
            samples[name][length].append((time.perf_counter_ns() - start_ns) / calls / 1e3)
    return samples


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=50, help="decisions per round")
    arguments = parser.parse_args()
    record = Record()
    samples = {profile: measure(profile, arguments.rounds, arguments.calls) for profile in PROFILES}
    result = {
        "rounds": arguments.rounds,
        "calls_per_round": arguments.calls,
        "limit_us": LIMIT_US,
        "decision_us": {profile: as_figures(measured) for profile, measured in samples.items()},
    }
    table = as_text(result)
    print(table, end="")
    record.keep(arguments.out, "decision", result, table)
    return 1 if missed(result) else 0


def as_figures(
    samples: dict[str, dict[int, list[float]]],
) -> dict[str, dict[str, dict[str, float]]]:
    return {
        name: {
            str(length): {
                "median": round(statistics.median(values), 3),
                "p10": round(statistics.quantiles(values, n=10)[0], 3),
                "p90": round(statistics.quantiles(values, n=10)[8], 3),
            }
            for length, values in lengths.items()
        }
        for name, lengths in samples.items()
    }


def as_text(result: dict[str, Any]) -> str:
    figures = result["decision_us"]
    lines = [
        "one decision: all options of one victim and target",
        f"microseconds, median (p10 .. p90) of {result['rounds']} rounds of "
        f"{result['calls_per_round']} decisions; limit {result['limit_us']}",
    ]
    for profile, by_name in figures.items():
        head = "".join(f"{length:>10,} tokens     " for length in LENGTHS_TOKENS).rstrip()
        lines += ["", profile, f"{'policy':<18}{head}"]
        for name, lengths in by_name.items():
            cells = (
                f"{x['median']:8.2f} ({x['p10']:.2f} .. {x['p90']:.2f})" for x in lengths.values()
            )
            lines.append(f"{name:<18}" + "  ".join(cells))
    lines += ["", *(missed(result) or ["PASSED"])]
    return "\n".join(lines) + "\n"


def missed(result: dict[str, Any]) -> list[str]:
    """Policies whose slowest median is above the limit."""
    slowest_us: dict[str, float] = {}
    for by_name in result["decision_us"].values():
        for name, lengths in by_name.items():
            medians = (found["median"] for found in lengths.values())
            slowest_us[name] = max(slowest_us.get(name, 0.0), *medians)
    return [
        f"MISSED: {name} {slowest:.2f} us; bar {result['limit_us']:g}"
        for name, slowest in slowest_us.items()
        if slowest > result["limit_us"]
    ]


if __name__ == "__main__":
    raise SystemExit(main())
