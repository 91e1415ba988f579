"""The `kvrs` command, also as `python -m kvrs`."""

import signal
import sys


def main() -> None:
    """Run the command line. Two signals to a proxy are blocked until it has handlers for them:
    their default would end it while it starts.
    """
    if sys.argv[1:2] == ["proxy"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    from kvrs.cli import main as run

    run()


if __name__ == "__main__":
    main()
