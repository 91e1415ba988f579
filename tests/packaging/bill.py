"""A bill of materials of what an installation takes from the index in use, as CycloneDX 1.6.

    pip install --dry-run --ignore-installed --report REPORT -c constraints.txt WHEEL
    python -m tests.packaging.bill REPORT

prints it. A component is a file with its SHA-256, so that it belongs to that index and platform. An
older pip, such as 23.2, leaves licence expressions out of its report: those of packages that are
installed here in the same version are read there.
"""

import json
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

_LICENCE = "License :: OSI Approved :: "


def bill(report: dict[str, Any]) -> dict[str, Any]:
    """The document for pip's report, of which exactly one item was asked for.

    Raises:
        ValueError: a file of which the report has no SHA-256.
    """
    items = report["install"]
    (root,) = (item for item in items if item["requested"])
    known = {_plain(item["metadata"]["name"]): _reference(item) for item in items}
    environment = report["environment"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component(root, "application")},
        "components": [_component(item, "library") for item in items if item is not root],
        "dependencies": [
            {"ref": _reference(item), "dependsOn": sorted(_needed(item, known, environment))}
            for item in items
        ],
    }


def _plain(name: str) -> str:
    """The name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _reference(item: dict[str, Any]) -> str:
    """The package URL."""
    metadata = item["metadata"]
    return f"pkg:pypi/{_plain(metadata['name'])}@{metadata['version'].replace('+', '%2B')}"


def _component(item: dict[str, Any], kind: str) -> dict[str, Any]:
    metadata, reference = item["metadata"], _reference(item)
    digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
    if digest is None:
        raise ValueError(f"{reference}: the report has no SHA-256")
    found = {
        "type": kind,
        "bom-ref": reference,
        "name": metadata["name"],
        "version": metadata["version"],
        "purl": reference,
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
    if expression := metadata.get("license_expression") or _installed_licence(metadata):
        found["licenses"] = [{"expression": expression}]
    elif (name := metadata.get("license", "").strip()) and "\n" not in name:
        found["licenses"] = [{"license": {"name": name}}]
    elif names := [each for each in metadata.get("classifier", []) if each.startswith(_LICENCE)]:
        found["licenses"] = [{"license": {"name": each.rpartition(" :: ")[2]}} for each in names]
    return found


def _installed_licence(metadata: dict[str, Any]) -> str | None:
    """The licence expression of the same version, if that is installed here and has one."""
    try:
        installed = distribution(metadata["name"])
    except PackageNotFoundError:
        return None
    if installed.version != metadata["version"]:
        return None
    found: list[str] = installed.metadata.get_all("License-Expression", [])
    return found[0] if found else None


def _needed(item: dict[str, Any], known: dict[str, str], environment: dict[str, str]) -> set[str]:
    """The references of what it requires here, without extras."""
    requirements = map(Requirement, item["metadata"].get("requires_dist", []))
    return {
        known[_plain(each.name)]
        for each in requirements
        if _plain(each.name) in known
        and (each.marker is None or each.marker.evaluate(environment | {"extra": ""}))
    }


if __name__ == "__main__":
    print(json.dumps(bill(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), indent=2))
