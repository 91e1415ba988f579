"""Messages between proxies of two versions, as during an upgrade."""

import msgspec
import pytest

import kvrs.protocol.mirror as mirror

# Fields without a default, as 0.1.0 had them.
REQUIRED = {
    "StreamEvent": {"seq", "ids", "data"},
    "KvLocation": {"holder", "epoch", "pages"},
    "StreamHeader": {"digest", "seed", "deadlines", "age_s", "owned_s"},
    "StreamState": set(),
    "Update": {
        *("key", "stream", "owner", "owner_epoch", "mirror_no", "first_event", "events", "state"),
    },
    "Batch": {"sender", "updates"},
    "UpdateAck": {"status"},
    "BatchAnswer": {"run", "acks"},
    "Hello": {"id", "run"},
    "Lookup": {"key"},
    "RecordVersion": {"stream", "owner_epoch", "mirror_no", "grants"},
    "LookupAnswer": {"version"},
    "ReadAnswer": {"record", "runs"},
    "Claim": {"key", "claimant", "version", "digest"},
    "ClaimAnswer": set[str](),
}


@pytest.mark.parametrize("name", REQUIRED)
def test_proxies_of_two_versions_understand_each_other(name: str) -> None:
    """A field that is new has a default for messages of the older version, which ignores it; one
    that the older version needs stays.
    """
    message = vars(mirror)[name]

    assert issubclass(message, msgspec.Struct)
    assert not message.__struct_config__.forbid_unknown_fields
    fields = msgspec.structs.fields(message)
    assert {each.name for each in fields if each.required} == REQUIRED[name]
