"""The `kvrs` command, also as `python -m kvrs`."""

import gc
import signal
import sys

from kvrs.process.memory import collect_nothing_yet


def main() -> None:
    """Run the command line. The signals SIGHUP and SIGUSR1 stay blocked until a proxy handles them,
    because their default action would end the process.
    """
    if sys.argv[1:2] == ["proxy"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    collect_nothing_yet()
    from kvrs.cli import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
