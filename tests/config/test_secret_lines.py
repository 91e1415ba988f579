from pathlib import Path

import pytest

from kvrs.config.file import ENV_NAME, read_secret, read_secrets
from kvrs.config.security import SecuritySettings
from kvrs.errors import ConfigError

OLD, NEW = b"the secret of yesterday", b"the secret of tomorrow!"


def write(path: Path, content: bytes) -> SecuritySettings:
    path.write_bytes(content)
    path.chmod(0o600)
    return SecuritySettings(secret_file=str(path))


def test_each_line_is_a_secret_and_the_first_is_in_use(tmp_path: Path) -> None:
    """White space at the ends of lines is no part of a secret."""
    security = write(tmp_path / "secret", OLD + b"\r\n" + NEW + b" \n\n")

    assert read_secrets(security, {}) == [OLD, NEW]
    assert read_secret(security, {}) == OLD


def test_the_environment_may_hold_several() -> None:
    assert read_secrets(SecuritySettings(), {ENV_NAME: (OLD + b"\n" + NEW).decode()}) == [OLD, NEW]


@pytest.mark.parametrize("content", [OLD + b"\nshort\n", OLD + b"\n\n" + NEW, b"\n"])
def test_a_short_or_empty_line_is_refused(tmp_path: Path, content: bytes) -> None:
    """Half a secret in a file that was just being written must not become a key."""
    with pytest.raises(ConfigError, match="allowed: at least 16"):
        read_secrets(write(tmp_path / "secret", content), {})
