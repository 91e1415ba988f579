"""Reports of supervisors about processes of instances that have ended."""

from typing import Any

import msgspec

from kvrs.core.control import Control
from kvrs.core.model import events as ev
from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import ExitReport
from kvrs.proxy.fleet.orders import check_named
from kvrs.proxy.wire.peer import UNREADABLE


class Exited(msgspec.Struct, frozen=True):
    """A report and the instance that it is about."""

    instance: InstanceId
    report: ExitReport


def parse_exit(instance: str, body: bytes) -> Exited:
    """Raises RequestError: the body is no report."""
    try:
        report = msgspec.json.decode(body, type=ExitReport)
    except UNREADABLE as fault:
        raise RequestError(
            f"{fault}; allowed: start, cause of 1 to 200 characters, and is_external"
        ) from None
    return Exited(InstanceId(instance), report)


def note_exit(control: Control[Any], exited: Exited, now_s: float) -> None:
    """Tell the policy.

    Raises:
        RequestError: there is no such instance, or no such start of it was up here.
    """
    name, report = exited.instance, exited.report
    check_named(name, [known.id for known in control.instances.present()])
    epochs = control.instances.known[name].epochs
    if report.start not in epochs:
        seen = ", ".join(map(str, epochs)) or "none, it was not up here"
        raise RequestError(f"start: got {report.start}; allowed: {seen}", param="start", status=409)
    event = ev.InstanceExited(name, epochs[report.start], report.cause, report.is_external)
    control.tell(event, now_s)
