"""Other settings for a proxy's books and policy, while streams run."""

from typing import TypeVar

from kvrs.config.file import Config
from kvrs.core.books.agent_slots import slot_share
from kvrs.core.control import Control
from kvrs.core.live import LiveStream
from kvrs.core.model import events as ev

S = TypeVar("S", bound=LiveStream)


def reload_settings(control: Control[S], before: Config, after: Config, now_s: float) -> None:
    """Go on with sections `policy` and `slo` of `after`; what is open and what has been learned
    stays.
    """
    control.slots.reload(slot_share(after))
    control.tell(ev.SettingsReloaded(after.policy, after.slo), now_s)
    if after.policy.gpu == before.policy.gpu:
        return
    for instance, state, reason in control.gpus.judgements():
        produced = control.produced_on(instance)
        control.tell(ev.GpuJudged(instance, state, reason, produced), now_s)
