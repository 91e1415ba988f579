"""Health of a proxy with several models: it is ready while one of them is."""

from collections.abc import Callable, Mapping

from aiohttp import web

from kvrs.proxy.api.health import add_probes, readiness
from kvrs.proxy.process.parts import Parts


def add_health_of(
    app: web.Application, models: Mapping[str, Parts], leaving: Callable[[], bool]
) -> None:
    def is_ready() -> bool:
        return any(parts.driver.control.instances.ready() for parts in models.values())

    def text() -> str:
        """A line of each model, or several."""
        return "".join(
            f"{name}: {line}\n"
            for name, parts in models.items()
            for line in readiness(parts.driver.control.instances).splitlines()
        )

    def streams() -> int:
        return sum(len(parts.driver.streams) for parts in models.values())

    add_probes(app, leaving, is_ready, text, streams)
