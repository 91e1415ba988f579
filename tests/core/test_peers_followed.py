"""Which numbered peers a proxy has after a look-up."""

import pytest

from kvrs.config.proxy import NumberedPeersSettings
from kvrs.core.fleet.numbered_peers import NameStatus, followed

POSSIBLE = NumberedPeersSettings(id="k-*", host="k-*.peers", peer_port=1, workers=2, most=3).others(
    "k-0"
)
ONE, TWO = POSSIBLE
FOUND, ABSENT, NO_ANSWER = NameStatus


@pytest.mark.parametrize(
    ("one", "held", "live", "is_peer"),
    [
        (FOUND, False, False, True),
        (ABSENT, False, False, False),
        (ABSENT, True, False, False),
        (ABSENT, True, True, True),  # It is up: its name has been lost, not the proxy.
        (ABSENT, False, True, False),
        (NO_ANSWER, True, False, True),
        (NO_ANSWER, False, False, False),
    ],
)
def test_a_peer_is_one_that_has_a_name_or_is_up(
    one: NameStatus, held: bool, live: bool, is_peer: bool
) -> None:
    """A look-up without an answer changes nothing."""
    answers = {ONE.id: one, TWO.id: FOUND}

    found = followed(POSSIBLE, [ONE] if held else [], answers, {"k-1.1"} if live else set())

    assert found == ([ONE, TWO] if is_peer else [TWO])
