"""One worker of a proxy, as its supervisor starts it: `python -m kvrs.proxy.workers DESCRIPTOR`."""

import signal
import sys

if __name__ == "__main__":
    # Until there are handlers for them: their default would end it while it starts.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    from kvrs.proxy.workers.worker import main

    main(int(sys.argv[1]))
