"""The bill of materials that `make package` writes."""

from importlib.metadata import version
from typing import Any

import pytest

from tests.packaging.bill import bill

ENVIRONMENT = {"python_version": "3.11", "sys_platform": "linux", "platform_machine": "x86_64"}


def item(name: str, version: str, requires: list[str], **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "version": version, "requires_dist": requires}
    hashes = {"hashes": {"sha256": name[0] * 64}}
    return {
        "metadata": metadata | more,
        "requested": name == "kvrs",
        "download_info": {"url": "u", "archive_info": hashes},
    }


def test_each_file_of_an_installation_is_listed_with_its_hash_and_what_it_needs() -> None:
    """Names are compared as indexes do; what an extra or another platform needs is not there."""
    needs = ["Py_YAML>=6", "tokenizers; python_version > '3'", "ray; extra == 'ray'"]
    report = {
        "environment": ENVIRONMENT,
        "install": [
            item("kvrs", "0.1.0", needs, license_expression="Apache-2.0"),
            item("py-yaml", "6.0", ["colour; sys_platform == 'win32'"], license="MIT"),
            item("tokenizers", "1.0+cpu", [], license="a whole\ntext"),
            item("ray", "2.0", []),
        ],
    }

    made = bill(report)

    listed = {each["name"]: each for each in made["components"]}
    assert made["metadata"]["component"]["licenses"] == [{"expression": "Apache-2.0"}]
    assert [*listed] == ["py-yaml", "tokenizers", "ray"]
    assert listed["py-yaml"]["hashes"] == [{"alg": "SHA-256", "content": "p" * 64}]
    assert listed["py-yaml"]["licenses"] == [{"license": {"name": "MIT"}}]
    assert listed["tokenizers"]["purl"] == "pkg:pypi/tokenizers@1.0%2Bcpu"
    assert "licenses" not in listed["tokenizers"]
    graph = {each["ref"]: each["dependsOn"] for each in made["dependencies"]}
    assert graph["pkg:pypi/kvrs@0.1.0"] == ["pkg:pypi/py-yaml@6.0", "pkg:pypi/tokenizers@1.0%2Bcpu"]
    assert graph["pkg:pypi/py-yaml@6.0"] == []


def test_licences_are_found_where_the_report_has_no_expression() -> None:
    """An older pip reads none. An installed package counts in the same version only, then come the
    classifiers.
    """
    here = version("msgspec")
    classified = {"classifier": ["Topic :: Internet", "License :: OSI Approved :: MIT License"]}

    def licences(*found: dict[str, Any]) -> list[Any]:
        report = {"environment": ENVIRONMENT, "install": [item("kvrs", "0", []), *found]}
        return [each.get("licenses") for each in bill(report)["components"]]

    assert licences(item("msgspec", here, [], **classified)) == [[{"expression": "BSD-3-Clause"}]]
    assert licences(item("msgspec", f"{here}.1", [])) == [None]
    assert licences(item("msgspec", f"{here}.1", [], **classified)) == [
        [{"license": {"name": "MIT License"}}]
    ]
    assert licences(item("not-installed-anywhere", "1", [])) == [None]


def test_a_file_without_a_hash_is_an_error() -> None:
    """A bill that leaves one out would be believed."""
    one = item("kvrs", "0.1.0", [])
    one["download_info"] = {"url": "u", "dir_info": {}}

    with pytest.raises(ValueError, match=r"kvrs@0\.1\.0: the report has no SHA-256"):
        bill({"environment": ENVIRONMENT, "install": [one]})
