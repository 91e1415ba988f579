"""Section `elastic` of the configuration: instances of several ranks that lose some."""

from pydantic import Field

from kvrs.config.settings import Settings


class ElasticSettings(Settings):
    enabled: bool = True
    """An instance of several ranks that loses one goes on with the others, in the same process and
    with the same streams, and grows back. false: a lost rank ends its instance.
    """
    spread_heads: bool = False
    """Each rank computes KV heads that cannot be divided evenly among the ranks for its own share
    of the streams. With as many streams as ranks, or more, no rank then has more to do than
    another. Every rank has the weights of such heads; where they have no room, heads are whole.
    false: some of the ranks compute these heads for all streams.
    """
    min_ranks: int = Field(default=1, ge=1, le=4096)
    """With fewer ranks an instance does not serve: it starts the lost ones again, or ends. At most
    the ranks of the smallest instance of several ranks.
    """
