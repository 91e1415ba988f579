"""Instances that die again and again soon after they came up: each further time such a one waits
longer before it gets work.
"""

from kvrs.core.model.member import Member, pause_s
from kvrs.ids import InstanceId

# A death within this time of coming up is a quick one.
_QUICK_S = 10.0
# So many of them in a row are no loop yet.
_FREE_DEATHS = 2
_FIRST_PAUSE_S = 1.0


class Restarts:
    def __init__(self) -> None:
        self._up_s: dict[InstanceId, float] = {}
        self._quick_deaths: dict[InstanceId, int] = {}  # In a row.

    def up(self, member: Member, now_s: float) -> None:
        """A process has come up; it is closed for a while if those before it died quickly."""
        name = member.id
        self._up_s[name] = now_s
        deaths = self._quick_deaths.get(name, 0)
        member.answers.quick_deaths = deaths
        if deaths >= _FREE_DEATHS:
            cause = f"it died {deaths} times within {_QUICK_S:g} s of coming up"
            pause = pause_s(name, _FIRST_PAUSE_S, deaths - _FREE_DEATHS)
            member.answers.close(cause, now_s, pause)
            self._up_s[name] += pause

    def forget(self, instance: InstanceId) -> None:
        """The next process of this name is that of another instance."""
        self._up_s.pop(instance, None)
        self._quick_deaths.pop(instance, None)

    def died(self, member: Member, now_s: float) -> None:
        name = member.id
        if now_s - self._up_s.get(name, now_s) < _QUICK_S:
            self._quick_deaths[name] = self._quick_deaths.get(name, 0) + 1
        else:
            self._quick_deaths.pop(name, None)
