"""Deadlines of a request, in headers because the OpenAI API has no fields for them."""

import re

from multidict import CIMultiDictProxy

from kvrs.core.model import events as ev
from kvrs.errors import RequestError

# The highest value of each header, in seconds. The configuration has the same bounds.
_LONGEST_S = {"x-kvrs-ttft-s": 86400, "x-kvrs-recovery-gap-s": 3600, "x-kvrs-deadline-s": 86400}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?", re.ASCII)


def deadlines_of(headers: CIMultiDictProxy[str]) -> ev.Deadlines:
    """The deadlines in the headers, which take the place of section `slo` of the configuration.

    Raises:
        RequestError: a header is not a number of seconds, or out of range.
    """
    given = [name for name in _LONGEST_S if name in headers]
    if not given:  # As nearly always.
        return ev.NO_DEADLINES
    return ev.Deadlines(
        *(_seconds(headers, name) if name in given else None for name in _LONGEST_S)
    )


def _seconds(headers: CIMultiDictProxy[str], name: str) -> float:
    values = headers.getall(name)
    text, longest_s = ", ".join(values), _LONGEST_S[name]
    seconds = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < seconds <= longest_s:
        raise RequestError(
            f"got {text!r:.80}; allowed: seconds above 0, up to {longest_s}", param=name
        )
    return seconds
