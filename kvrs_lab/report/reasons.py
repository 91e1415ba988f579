"""Says why each recovery option was chosen: a sentence for each option of a fault, from the
estimates that were compared.

An estimate is of one stream, before the other victims of the event are played through with it.
`auto` takes the least `total_s + others * at_target_s`: the stream's own time, and the time for
which it keeps other victims waiting at the target. Times in a sentence are medians of `total_s`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

_Row = Mapping[str, Any]
_ABOUT_EQUAL = 1.05  # Predictions that differ by less count as equal.


def reason_lines(
    rows: Sequence[_Row],
    blamed: Sequence[int | None],
    faults: Sequence[_Row],
    prompt_tokens: Mapping[int, int],
) -> list[str]:
    """Describe the choices after each fault, in order, the most frequent option first.

    Args:
        rows: recoveries, as the proxy's state has them.
        blamed: the position of each row's fault; None: of no fault.
        faults: the faults of the run.
        prompt_tokens: prompt tokens of streams by the row's `index`.
    """
    lines = []
    for at, fault in enumerate(faults):
        by_option: defaultdict[str, list[_Row]] = defaultdict(list)
        for row, of_fault in zip(rows, blamed, strict=True):
            if of_fault == at:
                by_option[row["option"]].append(row)
        what = f"{fault['what'].replace('_', ' ')} {fault['whom']}"
        for option, own in sorted(by_option.items(), key=lambda item: -len(item[1])):
            why = "; ".join([_cause(option, own, fault), *_costs(option, own)])
            lines.append(f"{what}: {option} for {len(own)}{_length(own, prompt_tokens)}: {why}.")
    return lines


def _length(rows: Sequence[_Row], prompt_tokens: Mapping[int, int]) -> str:
    lengths = sorted(
        prompt + (row.get("produced_tokens") or 0)
        for row in rows
        if (prompt := prompt_tokens.get(row.get("index", -1))) is not None
    )
    if not lengths:
        return ""
    span = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    return f" of {span} tokens"


def _cause(option: str, rows: Sequence[_Row], fault: _Row) -> str:
    """Say which KV was left of the streams, as far as sources and estimates tell."""
    sources = " and ".join(sorted({row["source"] for row in rows if row.get("source")}))
    match option:
        case "restore":
            return f"{sources or 'an agent'} had a checkpoint"
        case "migrate":
            return f"{sources or 'another instance'} still had KV"
        case "split":
            return f"a part came from {sources or 'another instance'}, the rest was computed"
        case "recompute":
            return _why_computed(rows, fault)
        case "start":
            return "there was no token and no KV yet"
        case _:
            return "its predicted cost was the least"


def _why_computed(rows: Sequence[_Row], fault: _Row) -> str:
    known = [row for row in rows if row.get("estimates")]
    alone = sum(not _others(row) for row in known)
    if not alone:
        return "to fetch KV was not predicted to cost less" if known else "nothing else is known"
    left = (
        "there was no KV to fetch"
        if alone == len(rows)
        else f"for {alone} there was no KV to fetch"
    )
    also = sorted({*fault.get("instances", ())} - {row["from"] for row in rows})
    return f"{left} ({' and '.join(also)} died too)" if also else left


def _others(row: _Row) -> list[_Row]:
    """The estimates of the options that were not chosen."""
    return [each for each in row.get("estimates") or () if each["option"] != row["option"]]


def _costs(option: str, rows: Sequence[_Row]) -> Iterator[str]:
    """Yield the predicted time of the option, those of the next best ones, and for how many streams
    the wait of other victims was decisive.
    """
    chosen_s: list[float] = []
    next_s: defaultdict[str, list[float]] = defaultdict(list)
    spared = 0
    for row in rows:
        own = next((each for each in row.get("estimates") or () if each["option"] == option), None)
        if own is None:
            continue
        chosen_s.append(own["total_s"])
        if not (others := _others(row)):
            continue
        count = row.get("others") or 0.0
        best = min(others, key=lambda each: _cost_s(each, count))
        next_s[best["option"]].append(best["total_s"])
        is_slower = own["total_s"] > _ABOUT_EQUAL * best["total_s"]
        spared += is_slower and _cost_s(own, count) < _cost_s(best, count)
    if not chosen_s:
        return
    words = f"predicted {_seconds(median(chosen_s))}"
    for other, times_s in sorted(next_s.items(), key=lambda item: -len(item[1])):
        many = "" if len(times_s) == len(rows) else f" (for {len(times_s)})"
        words += f", {other} {_seconds(median(times_s))}{many}"
    yield words
    if spared:
        yield f"slower alone for {spared}, but other streams wait less"


def _cost_s(estimate: _Row, others: float) -> float:
    """The cost by which options are compared."""
    waiting = others or estimate.get("waiting", 0)  # A single victim counts who waits already.
    return float(estimate["total_s"] + waiting * estimate.get("at_target_s", 0.0))


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:,.2f} s"
