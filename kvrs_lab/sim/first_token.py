"""Sources of a stream's first token; the module imports nothing, for the command line."""

from enum import StrEnum


class FirstToken(StrEnum):
    """The instance whose answer has the first token of a stream, if prefill is separate."""

    PREFILL = "prefill"
    DECODE = "decode"
