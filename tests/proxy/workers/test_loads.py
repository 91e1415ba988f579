"""What workers tell each other of what they have sent to instances, without processes."""

from kvrs.ids import InstanceId
from kvrs.proxy.workers.loads import NOTHING, Booked, Loads, booked_now, changes

WORKERS = dict.fromkeys(range(3))


def test_each_worker_hears_what_the_others_have() -> None:
    """Not what it has itself, and only what has changed."""
    loads = Loads()
    loads.note(0, {"d0": Booked(10, 2), "d1": Booked(0, 1)})
    loads.note(1, {"d0": Booked(5, 1)})

    assert loads.news(WORKERS) == {
        0: {"d0": Booked(5, 1)},
        1: {"d0": Booked(10, 2), "d1": Booked(0, 1)},
        2: {"d0": Booked(15, 3), "d1": Booked(0, 1)},
    }
    assert loads.news(WORKERS) == {}
    loads.note(1, {"d0": NOTHING})
    assert loads.news(WORKERS) == {0: {"d0": NOTHING}, 2: {"d0": Booked(10, 2)}}


def test_what_a_worker_had_ends_with_it() -> None:
    """And its successor is told everything."""
    loads = Loads()
    loads.note(0, {"d0": Booked(10, 2)})
    loads.note(1, {"d0": Booked(5, 1)})
    loads.news(WORKERS)

    loads.end(0)

    assert loads.news(WORKERS) == {
        0: {"d0": Booked(5, 1)},
        1: {"d0": NOTHING},
        2: {"d0": Booked(5, 1)},
    }


def test_news_can_be_repeated() -> None:
    """A worker that did not know an instance yet has dropped what it was told."""
    loads = Loads()
    loads.note(0, {"d0": Booked(10, 2)})
    loads.news(WORKERS)

    loads.repeat()

    assert loads.news(WORKERS) == {1: {"d0": Booked(10, 2)}, 2: {"d0": Booked(10, 2)}}


def test_an_instance_that_is_gone_has_nothing() -> None:
    """Its streams went elsewhere."""
    before = booked_now({InstanceId("d0"): (0.0101, 2), InstanceId("d1"): (0.0, 0)})

    assert before == {"d0": Booked(10, 2), "d1": NOTHING}
    assert changes(before, {"d1": Booked(1, 1)}) == {"d0": NOTHING, "d1": Booked(1, 1)}
    assert changes(before, before) == {}
