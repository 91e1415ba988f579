"""docs/guide/quickstart.md: its commands work as they stand there."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvrs.config.file import parse_config
from kvrs_lab.cluster.ports import resolve_ports

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "quickstart.md"
BOUND_S = 420

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.engine,
    pytest.mark.xdist_group("systems"),
    pytest.mark.nightly,
    *(
        pytest.mark.skipif(not shutil.which(tool), reason=f"not installed: {tool}")
        for tool in ("curl", "openssl")
    ),
]


def test_the_commands_of_the_quick_start_run(tmp_path: Path) -> None:
    """In their order, in one shell, at free ports; each has to succeed."""
    free = resolve_ports(parse_config({"proxy": {"port": 0, "admin_port": 0}})).proxy
    port, admin_port = free.port, free.admin_port
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    script = script.replace(":8000", f":{port}").replace(":8001", f":{admin_port}")
    environ = os.environ | {
        "KVRS_PROXY__PORT": str(port),
        "KVRS_PROXY__ADMIN_PORT": str(admin_port),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "400",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environ.pop("KVRS_SECRET", None)

    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        shown, _ = shell.communicate(timeout=BOUND_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)

    log = (tmp_path / "up.log").read_text() if (tmp_path / "up.log").exists() else ""
    assert shell.returncode == 0, f"{shown}\n{log}"
    assert "data: [DONE]" in shown
    assert "a stream waited" in shown
    assert "slots_max: 16  # KVRS_POLICY__SLOTS_MAX" in shown
    report = json.loads((tmp_path / "out" / "kill" / "report.json").read_text())
    assert (report["exact"], report["completed"], len(report["faults"])) == (True, 20, 1)
    assert report["settings"]["caches_at_the_start"] == "empty"
    assert (tmp_path / "out" / "kill" / "report.html").exists()
