"""The secret of a cluster is rotated while streams run: all processes are restarted with the next
ring of secrets, one after the other.
"""

import asyncio

import msgspec

from kvrs.ids import InstanceId
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, Reader, open_proxy_group
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.scripted_model import expected_ids, text_of

NEW = b"the secret of tomorrow, as long"
TOKENS = 150


async def restart_all(group: MultiProxyCluster, ring: list[bytes]) -> None:
    for name, instance in group.system.instances.items():
        await instance.kill()
        instance.secret, *instance.older = ring
        await instance.restart()
        while not all(is_up(group, number, name) for number in range(2)):
            await asyncio.sleep(0.005)
    for number in range(2):
        # The other one may take the connection to the former process for that to this one.
        while not are_copied(group):
            await asyncio.sleep(0.005)
        await group.kill(number)
        await group.start(number, ring)
        await group.know_each_other()


def are_copied(group: MultiProxyCluster) -> bool:
    """True if both proxies have the records of all streams."""
    copied = group.book(0).records.keys() == group.book(1).records.keys()
    return copied and not group.mirror(0).uncopied and not group.mirror(1).uncopied


def is_up(group: MultiProxyCluster, number: int, name: str) -> bool:
    driver = group.proxy(number).parts.driver
    return driver.control.instances.is_up(InstanceId(name))


def text_in(reader: Reader) -> str:
    choices = [msgspec.json.decode(event)["choices"] for event in reader.events]
    return "".join(each[0]["text"] for each in choices if each)


async def test_no_stream_is_lost_while_the_secret_is_rotated() -> None:
    """At each step of docs/guide/operating.md every process accepts what any other one uses; the
    old secret is removed when the streams that began under it have ended.
    """
    async with open_proxy_group(2) as group, asyncio.timeout(300):
        group.system.script.pause_s = 0.02
        before = [group.reader(f"before-{n}", max_tokens=TOKENS) for n in range(2)]
        after = [group.reader(f"after-{n}", max_tokens=TOKENS) for n in range(2)]

        reading = [asyncio.create_task(each.read_all(n)) for n, each in enumerate(before)]
        await restart_all(group, [SECRET, NEW])
        await restart_all(group, [NEW, SECRET])
        group.system.script.pause_s = 0.0
        await asyncio.gather(*reading)
        group.system.script.pause_s = 0.02
        reading = [asyncio.create_task(each.read_all(n)) for n, each in enumerate(after)]
        await restart_all(group, [NEW])
        group.system.script.pause_s = 0.0
        await asyncio.gather(*reading)

    wanted = "".join(map(text_of, expected_ids([1, 2, 3], TOKENS)))
    assert {text_in(reader) for reader in (*before, *after)} == {wanted}
