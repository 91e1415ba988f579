"""The process that Ray places and brings back: one instance of the embedded engine.

Ray only starts, watches and restarts it. Requests, tokens and pages never pass through Ray.
"""

import asyncio
import os
import threading
import traceback
from pathlib import Path

from kvrs.cluster.starts import next_start, report_fault
from kvrs.config import load_config, read_secret
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId


class InstanceActor:
    """Serves from a thread of its own; the actor's main thread stays free to answer Ray."""

    def __init__(self, config_path: str, instance_id: str, run_directory: str) -> None:
        # The log file in the run directory also marks this process as part of the run (see guard.py).
        self._log = (Path(run_directory) / f"{instance_id}.log").open("a", buffering=1)
        self._ready = threading.Event()
        self._config_path = Path(config_path)
        self._instance_id = InstanceId(instance_id)
        self._run_directory = Path(run_directory)
        self._epoch = next_start(self._run_directory, self._instance_id)
        threading.Thread(target=self._serve, name="engine", daemon=True).start()

    def wait_ready(self) -> int:
        """Block until requests are taken; the process id."""
        self._ready.wait()
        return os.getpid()

    def _serve(self) -> None:
        from kvrs.engine.server import serve  # Loads torch, which only this process needs.

        try:
            config = load_config(self._config_path)
            secret = read_secret(config.security, os.environ)
            asyncio.run(serve(config, self._instance_id, self._epoch, secret, asyncio.Event(), self._ready.set))
        except KvrsError as error:
            print(error, file=self._log)
            if not self._ready.is_set():
                report_fault(self._run_directory, self._instance_id, str(error))
        except BaseException:
            traceback.print_exc(file=self._log)
        finally:
            # An instance that does not serve must not look alive; Ray starts it again.
            os._exit(1)
