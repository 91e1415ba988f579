"""The OpenAPI documents of the guide."""

from pathlib import Path
from typing import Any

import yaml

_GUIDE = Path(__file__).parents[3] / "docs" / "guide"
CLIENTS, ADMIN = _GUIDE / "openapi-clients.yaml", _GUIDE / "openapi-admin.yaml"


def load(path: Path) -> dict[str, Any]:
    """A document as it is parsed."""
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document
