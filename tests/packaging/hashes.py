"""The hashes of what an installation takes from the index in use.

    pip install --dry-run --ignore-installed --report REPORT -c constraints.txt '.[dev]'
    python -m tests.packaging.hashes REPORT

prints requirements for `pip install --require-hashes`. They belong to that index and platform: the
CPU and CUDA builds of torch have one version and different files.
"""

import json
import sys
from pathlib import Path
from typing import Any


def locked(report: dict[str, Any]) -> list[str]:
    """A line for each file of pip's report, without the project itself.

    Raises:
        ValueError: a file of which the report has no SHA-256.
    """
    lines = []
    for item in report["install"]:
        pinned = f"{item['metadata']['name']}=={item['metadata']['version']}"
        if "dir_info" in item["download_info"]:
            continue
        found = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if found is None:
            raise ValueError(f"{pinned}: the report has no SHA-256")
        lines.append(f"{pinned} --hash=sha256:{found}")
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    print("\n".join(locked(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
