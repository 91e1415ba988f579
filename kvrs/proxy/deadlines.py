"""What a client was promised, said in headers because it is no part of the OpenAI API."""

import re

from multidict import CIMultiDictProxy

from kvrs.errors import RequestError
from kvrs.policy.events import Deadlines

# Each with the longest time that it may say, in seconds. The configuration has the same bounds.
_LONGEST_S = {"x-kvrs-ttft-s": 86400, "x-kvrs-recovery-gap-s": 3600, "x-kvrs-deadline-s": 86400}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?", re.ASCII)


def deadlines_of(headers: CIMultiDictProxy[str]) -> Deadlines:
    """What the headers promise in place of section `slo` of the configuration.

    Raises:
        RequestError: one of them is no number of seconds, or out of range.
    """
    # Nearly no request has any.
    return Deadlines(*(_seconds(headers, name) if name in headers else None for name in _LONGEST_S))


def _seconds(headers: CIMultiDictProxy[str], name: str) -> float:
    values = headers.getall(name)
    text, longest_s = ", ".join(values), _LONGEST_S[name]
    seconds = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < seconds <= longest_s:
        raise RequestError(f"got {text!r:.80}; allowed: seconds above 0, up to {longest_s}", param=name)
    return seconds
