"""Workers that live in the test's own process, under DistServe's own engine: no Ray, no model, and
every call can be held up.

Their KV is the tokens themselves, block by block, and the next token is a function of all of it. So
a wrong block table, or a block that was given away too early, shows as a wrong token.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from distserve_patches.jobs import Job, Stage

VOCABULARY = 251
NOTHING = -1


def next_token(tokens: Sequence[int]) -> int:
    return sum((index % 7 + 1) * token for index, token in enumerate(tokens)) * 31 % VOCABULARY


def continuation(history: Sequence[int], count: int) -> list[int]:
    tokens = list(history)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(history) :]


class Recorder:
    """A sink that checks the order of its calls."""

    def __init__(self, *, wants: int | None = None) -> None:
        self.wants = wants  # After so many tokens it wants no more.
        self.tokens: list[int] = []
        self.was_prefilled = False
        self.failure: tuple[Stage, str] | None = None
        self.over = asyncio.Event()
        self.on_prefilled: Callable[[], None] = lambda: None
        self.on_token: Callable[[], None] = lambda: None
        self.limit = 0

    def token(self, token_id: int) -> bool:
        assert not self.over.is_set(), "a token after the end"
        self.tokens.append(token_id)
        self.on_token()
        wants_more = self.wants is None or len(self.tokens) < self.wants
        if not wants_more or len(self.tokens) == self.limit:
            self.over.set()
        return wants_more

    def prefilled(self) -> None:
        assert not self.over.is_set()
        assert not self.tokens
        self.was_prefilled = True
        self.on_prefilled()

    def failed(self, stage: Stage, cause: str) -> None:
        assert not self.over.is_set(), "a failure after the end"
        self.failure = (stage, cause)
        self.over.set()


def new_job(
    number: int, history: Sequence[int], max_new: int, sink: Recorder, *, prefill_only: bool = False
) -> Job:
    sink.limit = 1 if prefill_only else max_new
    return Job(number, list(history), max_new, prefill_only, sink)


class World:
    """All fake workers, what holds them up, and what becomes of them."""

    def __init__(
        self,
        *,
        context_blocks: int,
        decoding_blocks: int,
        swap_blocks: int = 0,
        block_size: int = 4,
    ) -> None:
        self.blocks = {
            "context": (context_blocks, swap_blocks),
            "decoding": (decoding_blocks, swap_blocks),
        }
        self.block_size = block_size
        self.actors: list[FakeActor] = []
        self.held: set[tuple[str, str]] = set()  # (stage, method): such calls wait.
        self.fails: set[tuple[str, str]] = set()  # Such calls raise.
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.bugs: list[AssertionError] = []
        self.barren = 0  # So many more workers die while they are being started.

    def living(self, stage: str) -> list["FakeActor"]:
        return [actor for actor in self.actors if actor.stage == stage and not actor.dead]

    def kill(self, stage: str) -> None:
        for actor in self.living(stage):
            actor.die()


class FakeWorkerClass:
    """In place of the actor class `ParaWorker`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def options(self, **_: object) -> "FakeWorkerClass":
        return self

    def remote(self, **arguments: Any) -> "FakeActor":
        actor = FakeActor(self._world, arguments["stage"].value)
        self._world.actors.append(actor)
        if self._world.barren:
            self._world.barren -= 1
            actor.die()
        return actor


class FakeActor:
    def __init__(self, world: World, stage: str) -> None:
        self.world = world
        self.stage = stage
        self.dead = False
        self.death = asyncio.Event()
        self.blocks: dict[int, list[int]] = {}
        self.swap: dict[int, list[int]] = {}
        self.context: FakeActor | None = None
        self._calls: asyncio.Queue[tuple[str, tuple[Any, ...], asyncio.Future[Any]]] = (
            asyncio.Queue()
        )
        self._waiting: set[asyncio.Future[Any]] = set()
        self._runner = asyncio.get_running_loop().create_task(self._run())

    def __getattr__(self, name: str) -> "FakeMethod":
        return FakeMethod(self, name)

    # Ray reads its environment when it is imported, which is not to happen before a fixture has set
    # it.

    def call(self, name: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        from ray.exceptions import RayActorError

        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A call that is not awaited may fail unnoticed, as with Ray.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.world.calls[self.stage, name] += 1
        if self.dead:
            future.set_exception(RayActorError())
        else:
            self._waiting.add(future)
            self._calls.put_nowait((name, arguments, future))
        return future

    def die(self) -> None:
        from ray.exceptions import RayActorError

        self.dead = True
        self._runner.cancel()
        for future in self._waiting:
            if not future.done():
                future.set_exception(RayActorError())
        self.death.set()

    async def _run(self) -> None:
        from ray.exceptions import RayTaskError

        while True:
            name, arguments, future = await self._calls.get()
            while (self.stage, name) in self.world.held:
                await asyncio.sleep(0.001)
            try:
                if (self.stage, name) in self.world.fails:
                    raise OSError("broken on purpose")
                result = getattr(self, f"_do_{name.lstrip('_')}")(*arguments)
            except AssertionError as error:
                self.world.bugs.append(error)
                result = RayTaskError(name, str(error), error)
            except OSError as error:
                result = RayTaskError(
                    name, "Traceback: ray::on purpose\nOSError: broken on purpose", error
                )
            self._waiting.discard(future)
            if future.done():
                continue
            if isinstance(result, RayTaskError):
                future.set_exception(result)
            else:
                future.set_result(result)

    # What upstream's worker can do.

    def _do_ready(self) -> None:
        pass

    def _do_init_model(self) -> None:
        pass

    def _do_profile_num_available_blocks(self, *_: object) -> tuple[int, int]:
        return self.world.blocks[self.stage]

    def _do_init_kvcache_and_swap(self, gpu: int, cpu: int) -> "FakeActor":
        size = self.world.block_size
        self.blocks = {block: [NOTHING] * size for block in range(gpu)}
        self.swap = {block: [NOTHING] * size for block in range(cpu)}
        return self

    def _do_register_kvcache_mem_handles(self, _: object, handles: list[list["FakeActor"]]) -> None:
        self.context = handles[0][0]

    def _do_step(
        self, _: object, tokens: list[list[int]], firsts: list[int], tables: list[list[int]]
    ) -> list[int]:
        return [self._compute(*request) for request in zip(tokens, firsts, tables, strict=True)]

    def _compute(self, tokens: list[int], first: int, table: list[int]) -> int:
        size = self.world.block_size
        for position, token in enumerate(tokens, first):
            self.blocks[table[position // size]][position % size] = token
        known = [token for block in table for token in self.blocks[block]][: first + len(tokens)]
        assert NOTHING not in known, "there is a hole in the KV"
        return next_token(known)

    def _do_migrate_blocks(self, sources: list[int], _: object, targets: list[int]) -> None:
        if self.context is None or self.context.dead:
            raise OSError("there is no worker to copy from")
        for source, target in zip(sources, targets, strict=True):
            self.blocks[target] = list(self.context.blocks[source])

    def _do_swap_blocks(
        self, ids: list[int], sources: list[int], targets: list[int], is_swap_in: bool
    ) -> None:
        assert all(isinstance(number, int) for number in ids)
        for source, target in zip(sources, targets, strict=True):
            if is_swap_in:
                self.blocks[target] = list(self.swap[source])
            else:
                self.swap[target] = list(self.blocks[source])

    def _do_clear_request_resource(self, number: int) -> None:
        assert isinstance(number, int)

    def _do_wait_for_all_swap_in(self) -> None:
        pass

    def _do_wait_for_all_swap_out(self) -> None:
        pass


class FakeMethod:
    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return self._actor.call(self._name, arguments)
