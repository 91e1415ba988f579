"""DistServe's servers from a checkout, on its runtime without a GPU, in place of embedded engines.

Both instances of a node are one process, which starts a Ray of its own below the run's directory:
the guard of `kvrs_lab.cluster` ends what is left of it.
"""

import argparse
import os
import secrets
from functools import partial

from kvrs.config.cluster import Backend
from kvrs.config.distserve import HOME_ENV
from kvrs.config.file import Config
from kvrs_lab.cluster.loopback_ray import ENVIRONMENT
from kvrs_testkit.processes import Processes, says_ready

# Each loads torch in the server and in its workers, next to those of the others; then it measures
# its stages.
START_TIMEOUT_S = 300.0


def processes_for(config: Config) -> Processes:
    """Instances of the configuration's backend."""
    is_distserve = config.cluster.backend is Backend.DISTSERVE
    return DistServeServers(config) if is_distserve else Processes(config)


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--distserve", action="store_true", help=f"DistServe's servers, of the {HOME_ENV}"
    )


def check_option(parser: argparse.ArgumentParser, *, distserve: bool) -> None:
    if distserve and HOME_ENV not in os.environ:
        parser.error(f"{HOME_ENV} is not set; it names a checkout of DistServe")


class DistServeServers(Processes):
    def start(self, *names: str) -> None:
        """Start the servers of these instances, and these agents."""
        servers = self._servers()
        super().start(*(name for name in names if name not in servers))
        for server, node in dict.fromkeys(servers[name] for name in names if name in servers):
            if (former := self._running.get(server)) is not None:
                former.wait()
            # Sockets with long names lie below it.
            ray_directory = self.directory / node
            ray_directory.mkdir(exist_ok=True)
            self._spawn(
                server,
                "distserve_patches.api_server",
                *self.config.cluster.distserve.flags,
                *("--kvrs-config", str(self._config_path), "--kvrs-node", node),
                *("--epoch", str(self._starts[server] + 1), "--end-with", str(os.getpid())),
                RAY_TMPDIR=str(ray_directory),
                RAY_AUTH_TOKEN=secrets.token_hex(32),
                HF_HUB_OFFLINE="1",
                **ENVIRONMENT,
            )

    def wait_ready(self, *names: str) -> None:
        servers = self._servers()
        super().wait_ready(*(name for name in names if name not in servers))
        for server, _ in dict.fromkeys(servers[name] for name in names if name in servers):
            self._wait(server, partial(says_ready, self._log(server)), START_TIMEOUT_S)

    def pid(self, name: str) -> int:
        server = self._servers().get(name)
        return super().pid(name if server is None else server[0])

    def _servers(self) -> dict[str, tuple[str, str]]:
        """Name of the process and node of each instance."""
        return {
            instance.id: (f"server-{node.id}", node.id)
            for node, instance in self.config.cluster.instances()
        }
