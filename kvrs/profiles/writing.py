"""Writer of the profile files of `kvrs profile`."""

import tempfile
from pathlib import Path

import msgspec

from kvrs.profiles.catalog import parse_profile
from kvrs.profiles.schema import Profile


def faults_of_out(out: Path) -> list[str]:
    """Return the reasons why no profile can be written to `out`, which are checked before
    measuring.
    """
    if out.suffix != ".json" or out.is_dir():
        return [
            f"--out: got {out}; allowed: a name that ends in .json, by which `profiles.prefill` "
            f"knows it"
        ]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            return []
    except OSError as error:
        return [f"--out: {out.parent}: {error.strerror}"]


def write_profile(profile: Profile, out: Path) -> Path:
    """Write the file atomically; return its path."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
    parse_profile(text, str(out))
    temporary = out.with_name(f"{out.name}.new")
    temporary.write_bytes(text)
    temporary.replace(out)
    return out
