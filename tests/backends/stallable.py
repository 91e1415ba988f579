"""Runs a module in a process whose event loop stalls on SIGUSR2: the main thread is busy for 6 s,
and computes for a fifth of that.
"""

import runpy
import signal
import sys
import time

from kvrs_testkit.forked import forget


def stall(*_: object) -> None:
    until_s = time.monotonic() + 6.0
    while time.monotonic() < until_s:
        computed_s = time.monotonic() + 0.01
        while time.monotonic() < computed_s:
            pass
        time.sleep(0.04)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, stall)
    sys.argv = sys.argv[1:]
    forget(sys.argv[0])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
