"""How much room a stream's checkpoint is promised."""

import pytest

from kvrs.agent.config import BackupMode, BackupSettings
from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Place, Start
from kvrs.policy.events import InstanceUp, StreamArrived
from tests.policy.policy_stories import GEOMETRY, Story, instance, of, only


@pytest.mark.parametrize(("most_tokens", "pages"), [(None, 30), (160, 10), (9000, 30)])
def test_no_stream_comes_to_more_than_its_model_can(most_tokens: int | None, pages: int) -> None:
    """Whoever names no end may go that far. Also when it came before any instance had said how far that is."""
    story = Story("p0", backup=BackupSettings(mode=BackupMode.REMOTE))
    story.agents("n1")
    waits = story.tell(StreamArrived(StreamId("A"), 100, most_tokens=most_tokens))

    start = only(story.tell(InstanceUp(instance("d0", max_model_len=480))), Start)

    assert of(waits, Start) == []
    assert start.plan.places == (Place(InstanceId("agent-n1"), pages * GEOMETRY.page_bytes),)
