"""A keyed stream of an alias or adapter that goes on at another proxy keeps its name."""

import asyncio

import msgspec
import pytest

from kvrs.protocol.instance import Adapter, ModelNames
from kvrs_testkit.multi_proxy_cluster import open_proxy_group, record_key
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.scripted import Scripted
from kvrs_testkit.scripted_model import expected_ids, text_of

HAVING = ("p1", "d1", "d2")
WANTED = "".join(map(text_of, expected_ids([1, 2, 3], 8)))


def prepare(instances: dict[str, Scripted]) -> None:
    for name, instance in instances.items():
        adapters = (Adapter("lora1", "/adapters/1"),) if name in HAVING else ()
        instance.names = ModelNames(("alias",), adapters)


@pytest.mark.parametrize(("name", "allowed"), [("lora1", {"d1", "d2"}), ("alias", None)])
async def test_a_stream_that_is_resumed_at_another_proxy_keeps_its_name(
    name: str, allowed: set[str] | None
) -> None:
    """It goes on at an instance that has it, though its own one is gone, with the same salt."""
    async with open_proxy_group(pairs=3, prepare=prepare) as here:
        instances = here.system.instances
        gate = here.system.script.gate = asyncio.Event()
        here.system.script.gate_at = 4
        reader = here.reader(model=name)
        reading = asyncio.create_task(reader.read(0))
        async with asyncio.timeout(WITHIN_S):
            while len(reader.events) < 4 or record_key("k") not in here.book(1).records:
                await asyncio.sleep(0.005)
            while len(here.book(1).records[record_key("k")].events) < 4:
                await asyncio.sleep(0.005)
        decoding = next(each for each in instances.values() if each.running)
        await decoding.kill()
        await here.kill(0)
        await reading
        gate.set()

        await reader.read_all(1)

        choices = [msgspec.json.decode(event)["choices"] for event in reader.events]
        assert "".join(each[0]["text"] for each in choices if each) == WANTED
        bodies = [body for each in instances.values() for body in each.bodies]
        used = {each.id for each in instances.values() if each.bodies and each.id[0] == "d"}
        assert {body["model"] for body in bodies} == {name}
        assert len({body.get("cache_salt") for body in bodies}) == 1
        assert decoding.id in used
        assert len(used) > 1
        assert allowed is None or used == allowed
