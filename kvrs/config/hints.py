"""Hints behind faults of a configuration: what a text should be, in words of an operator."""

import re

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_SIZE = re.compile(_NUMBER + r" ?([kKMGT])(i?)(B|bit)?(?:/s)?")
_TIME = re.compile(_NUMBER + r" ?(ms|s|min|m|h)")
_POWER = {"k": 3, "K": 3, "M": 6, "G": 9, "T": 12}
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
# Form of most names, as a regular expression; its group is what they have beside letters and
# digits.
_NAME_PATTERN = re.compile(r"\^\[A-Za-z0-9_\]\[A-Za-z0-9(.+)\]\*\$")


def number_hint(text: str, key: str) -> str:
    """Return how to write a text as the number of a key, whose last part is its unit; empty: not
    known.
    """
    if (found := _SIZE.fullmatch(text)) is not None:
        number, letter, binary, unit = found.groups()
        written = f"{number}e{_POWER[letter]}"
        if binary or unit == "bit":
            scale = 1024 ** (_POWER[letter] // 3) if binary else 10 ** _POWER[letter]
            written = f"{float(number) * scale / (8 if unit == 'bit' else 1):.15g}"
        return f" (write {written}, without a unit)"
    if (found := _TIME.fullmatch(text)) is not None and key.endswith("_s"):
        return f" (write {float(found[1]) * _SECONDS[found[2]]:g}: {key} is in seconds)"
    return " (without quotes)" if re.fullmatch(r"[-+0-9.eE]+", text) else ""


def pattern_in_words(pattern: str) -> str | None:
    """Return what a pattern of a name allows, in words; None: the pattern is of another form."""
    found = _NAME_PATTERN.fullmatch(pattern)
    return found and f"allowed: letters, digits and `{found[1]}`, first a letter, a digit or `_`"
