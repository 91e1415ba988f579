"""`make sign`: hashes of all that `make package` leaves, and a signature of them."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here"),
]


def test_files_of_a_release_are_signed_by_the_key_that_is_named(tmp_path: Path) -> None:
    """By `ssh-keygen -Y verify` and `sha256sum --check`, as security.md has it."""
    key, package = tmp_path / "key", tmp_path / "package"
    package.mkdir()
    (package / "kvrs.whl").write_bytes(b"wheel")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers = tmp_path / "allowed_signers"
    signers.write_text(f"release@example {key.with_suffix('.pub').read_text()}")
    verify = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "release@example"]
    check = " ".join([*verify, "-n kvrs -s SHA256SUMS.sig < SHA256SUMS"])

    made = ["make", "--no-print-directory", "sign", f"PACKAGE={package}", f"SIGNING_KEY={key}"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)

    def passes() -> bool:
        script = f"{check} && sha256sum --check --strict SHA256SUMS"
        return subprocess.run(script, shell=True, cwd=package, capture_output=True).returncode == 0

    assert passes()
    (package / "kvrs.whl").write_bytes(b"another")
    assert not passes()
    sums = subprocess.run(["sha256sum", "kvrs.whl"], cwd=package, capture_output=True, check=True)
    (package / "SHA256SUMS").write_bytes(sums.stdout)
    assert not passes()
