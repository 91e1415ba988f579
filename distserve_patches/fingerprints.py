"""Comparison of a checkout with the DistServe of kvrs: all files that kvrs wraps, overrides or
relies on.

`python -m distserve_patches.fingerprints` prints the table for the checkout of DISTSERVE_HOME.
"""

import hashlib
from pathlib import Path

from distserve_patches import checkout
from kvrs.errors import ConfigError

COMMIT = "82831f1"
TABLE = {
    "block_manager.py": "755f85c0ce6d9536",
    "config.py": "3d01ca834802cf48",
    "context_stage_scheduler.py": "f29605d87e7d53ae",
    "decoding_stage_scheduler.py": "d49be415d74a0ce6",
    "downloader/downloader.py": "84726be59610ab94",
    "engine.py": "2a210293eec95278",
    "llm.py": "218d666189286868",
    "models.py": "73237d428a0bff3e",
    "request.py": "bb17a1cc61bab9b4",
    "single_stage_engine.py": "c4736dd19f19e831",
    "tokenizer.py": "cd70cd24f69fa7c2",
    "utils.py": "e763e4b9ba0b86c6",
    "worker.py": "fdd7f8fee440aa94",
}


def check(home: Path) -> None:
    """Compare every file of the table.

    Raises:
        ConfigError: files are missing or differ; the message names each.
    """
    faults = []
    for name, expected in TABLE.items():
        if (found := fingerprint(home, name)) != expected:
            what = "is not there" if found is None else "differs"
            faults.append(
                f"distserve/{name}: {what}; kvrs was written for DistServe at commit {COMMIT}"
            )
    if faults:
        raise ConfigError(faults)


def fingerprint(home: Path, name: str) -> str | None:
    """Hash a file of `distserve/`; None: no such file."""
    file = home / "distserve" / name
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() if file.is_file() else None


if __name__ == "__main__":
    for each in TABLE:
        print(f'    "{each}": "{fingerprint(checkout.find(None), each)}",')
