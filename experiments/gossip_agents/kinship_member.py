"""One member of a cluster of the PyPI package `kinship`, in an environment of its own. It logs its
member changes as an agent does.

python kinship_member.py NAME PORT KEY SEED_PORT...
"""

import asyncio
import logging
import sys

import kinship  # type: ignore[import-not-found, unused-ignore]

STATUS = {
    "MemberJoined": "alive",
    "MemberRecovered": "alive",
    "MemberSuspect": "suspect",
    "MemberDead": "dead",
    "MemberLeft": "left",
}


async def main(name: str, port: str, key: str, *seeds: str) -> None:
    config = kinship.Config.lan(
        name=name,
        bind=f"127.0.0.1:{port}",
        keys=[key],
        seeds=[f"127.0.0.1:{seed}" for seed in seeds],
    )
    async with kinship.Cluster(config) as cluster:
        events = cluster.events()
        for member in cluster.members():
            if member.name != name:
                note(member.name, "alive", member.epoch)
        print("ready", flush=True)
        async for event in events:
            if (status := STATUS.get(type(event).__name__)) is not None:
                note(event.member.name, status, event.member.epoch)


def note(member: str, status: str, epoch: int) -> None:
    logging.info("member changed member=%s status=%s epoch=%s", member, status, epoch)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
