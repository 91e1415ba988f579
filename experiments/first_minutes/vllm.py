"""From nothing to a stream that outlives its server, where vLLM runs: kvrs is installed into an
empty environment, with what pip has in its cache, and its proxy started before two servers.

    KVRS_VLLM_PYTHON=.venv-vllm/bin/python python -m experiments.first_minutes.vllm
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.demo_vllm.run import KILL_AT, options_of, stream, until_tested
from experiments.first_minutes.demo import Phases
from experiments.record import ROOT, Record
from kvrs.config.file import ENV_NAME, dump_config
from kvrs.load.admin import AdminClient
from kvrs_testkit.vllm_servers import VllmServers, connector_config

BAR_S = 60.0


def installed(folder: Path, environ: dict[str, str]) -> Path:
    """The command of a new environment without extras."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
    constraints = str(ROOT / "constraints.txt")
    command = [*pip, "--constraint", constraints, str(ROOT)]
    subprocess.run(command, check=True, cwd=folder, env=environ)
    return folder / "bin/kvrs"


def measure(servers: VllmServers, folder: Path) -> tuple[Phases, bool]:
    """Times of the phases, and whether the stream ended once and whole."""
    config = servers.config
    environ = os.environ | {ENV_NAME: servers.secret.decode()}
    environ.pop("PYTHONPATH", None)
    phases = Phases()
    killed: list[str] = []
    with phases.phase("installation"):
        kvrs = installed(folder / "venv", environ)
    path = folder / "kvrs.yaml"
    path.write_text(dump_config(config))
    admin = AdminClient(f"http://{config.proxy.admin_host}:{config.proxy.admin_port}")

    def strike() -> None:
        (row,) = admin.state()["streams"]
        killed.append(row["decode"])
        servers.kill(row["decode"])

    command = [str(kvrs), "proxy", "--config", str(path)]
    proxy = subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.DEVNULL)
    try:
        with phases.phase("the proxy, until both servers are tested"):
            until_tested(admin, len(servers.names))
        with phases.phase("a stream whose server is killed"):
            url = f"http://{config.proxy.host}:{config.proxy.port}"
            found = stream(url, servers.model, "first", at=KILL_AT, strike=strike)
    finally:
        proxy.terminate()
        proxy.wait()
    return phases, bool(killed) and found.is_whole and found.finishes == 1


def main() -> int:
    options = options_of(__doc__, __file__)
    record = Record()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        with VllmServers(connector_config(folder), options.python) as servers:
            print("starting two servers of vLLM and two agents (a minute or two) ...", flush=True)
            servers.start_all()
            phases, is_whole = measure(servers, folder)
    text = phases.as_text(BAR_S)
    if not is_whole:
        text += "\nthe stream did not end once and whole behind a kill"
    print(text)
    is_met = is_whole and phases.whole_s <= BAR_S
    figures = {"seconds": phases.seconds, "whole_s": phases.whole_s, "is_whole": is_whole}
    is_void = record.keep(options.out, "vllm", figures, text)
    return 0 if is_met and not is_void else 1


if __name__ == "__main__":
    sys.exit(main())
