"""An instance's account of itself, read by a proxy of another version."""

import msgspec

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, InstanceInfo, MeasuredPrefill, Role

INFO = InstanceInfo(
    id=InstanceId("d0"),
    node=NodeId("n0"),
    role=Role.DECODE,
    epoch=1,
    pid=1,
    model="model",
    fingerprint="print",
    geometry=KvGeometry(layers=2, kv_heads=2, head_dim=8, dtype_bytes=4, page_size_tokens=16),
    max_model_len=4096,
    page_port=1,
    capabilities=[Capability.RETAIN],
    prefill=MeasuredPrefill("measured", 64, [0.01, 0.02]),
)


def test_a_capability_of_a_later_version_is_ignored() -> None:
    """It keeps its name, and the others count as without it."""
    declared = msgspec.json.encode(INFO).replace(b'"retain"', b'"later","retain"')

    read = msgspec.json.decode(declared, type=InstanceInfo)

    assert Capability.RETAIN in read.capabilities
    assert read.capabilities[0] not in list(Capability)
    assert frozenset(read.capabilities) & frozenset(Capability) == {Capability.RETAIN}
    assert msgspec.json.encode(read) == declared
