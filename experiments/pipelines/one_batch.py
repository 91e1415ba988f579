"""An instance of the embedded engine that computes one batch at a time, whatever its stages."""

import sys

from kvrs.engine import instance
from kvrs.engine.__main__ import main
from kvrs.engine.core import EngineCore
from kvrs.scheduling.flights import Flights


class OneBatch(EngineCore):
    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named | {"batches": 1})  # type: ignore[arg-type]
        self.scheduler._in_flight = Flights()


if __name__ == "__main__":
    vars(instance)["EngineCore"] = OneBatch
    sys.exit(main())
