"""What a kept result says of its run: commit, machine, load, seed."""

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any


def keep(out: Path | None, name: str, seed: int, load: float, rows: list[dict[str, Any]]) -> None:
    """Write the rows with their circumstances to `out/name.json`; nothing without `out`."""
    if out is None:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    record = {
        "commit": commit,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "seed": seed,
        "rows": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
