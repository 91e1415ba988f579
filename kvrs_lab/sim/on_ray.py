"""Seeds of a case on the machines of a Ray cluster that runs: one task for each, whose result comes
as it ends. A task whose machine is lost is given to another one.

The machines need this version of kvrs, which a task checks first: another one has other results.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from kvrs import __version__
from kvrs.errors import ConfigError
from kvrs_lab.sim.case import SimulateOptions

T = TypeVar("T")
Task = Callable[[SimulateOptions, int], T]


def on_ray(
    address: str, options: SimulateOptions, seeds: Sequence[int], run: Task[T]
) -> Iterator[T]:
    """Yield the results of `run` for each seed, in the order in which they end.

    Raises:
        ConfigError: no Ray answers at the address, or its machines have another version of kvrs.
    """
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        allowed = "the address of a Ray cluster that runs"
        raise ConfigError(f"--ray: got {address!r}: {error}; allowed: {allowed}") from None
    try:
        trace = None if options.trace is None else options.trace.read_bytes()
        shared = ray.put((options, trace, run))
        task = ray.remote(num_cpus=1, max_retries=3)(_run_there)
        waiting = [task.remote(__version__, shared, seed) for seed in seeds]
        while waiting:
            ended, waiting = ray.wait(waiting)
            for each in ray.get(ended):
                if isinstance(each, _OtherVersion):
                    raise ConfigError(
                        f"--ray: got {address!r}, a machine of which has kvrs {each}; allowed: "
                        f"{__version__}, as here"
                    )
                yield each
    finally:
        ray.shutdown()


class _OtherVersion(str):
    """That of a machine."""


def _run_there(
    version: str, shared: tuple[SimulateOptions, bytes | None, Task[T]], seed: int
) -> T | _OtherVersion:
    if version != __version__:
        return _OtherVersion(__version__)
    options, trace, run = shared
    if trace is None or options.trace is None:
        return run(options, seed)
    with TemporaryDirectory() as there:
        path = Path(there) / options.trace.name
        path.write_bytes(trace)
        return run(replace(options, trace=path), seed)
