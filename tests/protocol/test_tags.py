"""Tags of pages tell apart what has other KV."""

from hypothesis import given
from hypothesis import strategies as st

from kvrs.core.fleet.known import ServedName
from kvrs.protocol.instance import Adapter
from kvrs.protocol.pages import page_tags, root_tag, salt_of

IDS = list(range(64))
LORA = ServedName("lora", Adapter("lora", "/adapters/1").key, "tiny", "/adapters/1")
SALTS, NAMES = st.text(max_size=8), st.text(min_size=1, max_size=8)


def tags(salt: str, adapter: str) -> list[bytes]:
    return list(page_tags(root_tag("weights", salt_of(salt, adapter)), IDS, 16))


def test_an_adapter_changes_every_tag_and_an_alias_none() -> None:
    """Its KV differs from the model's for the same tokens; an alias is only another name."""
    again = ServedName("lora", Adapter("lora", "/adapters/2").key, "tiny", "/adapters/2")
    other = ServedName("sql", Adapter("sql", "/adapters/1").key, "tiny", "/adapters/1")
    own, alias = ServedName("tiny"), ServedName("small", "small")

    found = [tags("", each.adapter) for each in (own, LORA, again, other)]

    assert len({tag for each in found for tag in each}) == 4 * 4
    assert tags("", alias.adapter) == found[0]


@given(SALTS, SALTS, NAMES, NAMES)
def test_pages_are_shared_only_within_one_adapter_and_one_salt(
    salt: str, other_salt: str, adapter: str, other: str
) -> None:
    """So that neither the tenant nor the client's own salt is lost with an adapter."""
    same = (salt, adapter) == (other_salt, other)

    assert (tags(salt, adapter) == tags(other_salt, other)) is same
    assert tags(salt, adapter) != tags(salt, "")
