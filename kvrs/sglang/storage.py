"""Storage backend of HiCache: it keeps KV pages in this server's shared memory, which the node's
agent holds too, and loads pages of dead and of other servers from agents.

SGLang loads it by `--hicache-storage-backend dynamic` and `--hicache-storage-backend-extra-config
'{"backend_name": "kvrs", "module_path": "kvrs.sglang.storage", "class_name": "KvrsStorage",
"interface_v1": 1, "config": FILE, "instance": ID, "region_bytes": N}'`. Storing pages sends
nothing.

HiCache calls the backend from threads of its own: one for lookups, one for loads and one for
stores. Methods that the scheduler calls never block. An error within kvrs turns the backend off: it
then finds and keeps nothing, and SGLang computes.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_memory, get_server_args

from kvrs.engines.guard import Switch, guarded
from kvrs.engines.place import EnginePlace, namespace_of
from kvrs.engines.proof import RowProofs
from kvrs.errors import ConfigError, KvrsError
from kvrs.process.memory import free_bytes
from kvrs.protocol.rows import HOLDS_ABORTED, SGLANG_VARIABLE, RegionInfo
from kvrs.sglang import space
from kvrs.sglang.pages import MAX_ASKED, PageRegion, Pages
from kvrs.transfer.rows.client import RegionLink

log = logging.getLogger(__name__)

_CHANGES_OF_WEIGHTS = ("update_weights_from_", "load_weights_from_", "begin_weight_update")


class _Options(msgspec.Struct, frozen=True):
    """Options of kvrs in SGLang's `--hicache-storage-backend-extra-config`."""

    config: str
    instance: str
    region_bytes: Annotated[int, msgspec.Meta(gt=0)]
    lookup_s: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.3
    load_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0


def _holds_aborted() -> bool | None:
    """Return whether SGLang keeps the pages of a request that is aborted while its KV moves; say in
    its log if it does not. None: this version does not show it.
    """
    try:
        from sglang.srt.environ import envs

        holds = bool(getattr(envs, SGLANG_VARIABLE).get())
    except Exception:
        return None
    if not holds:
        log.warning(
            "%s is off: an aborted request's pages go to others while they are written",
            SGLANG_VARIABLE,
        )
    return holds


class KvrsStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not checked.
    """HiCache's storage for the pages of one rank. `_pages` is None until the model's files are
    read, and for good if pages cannot be shared.
    """

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        self.switch = Switch(self._let_go)
        self._config = storage_config
        self._pages: Pages | None = None
        self._link: RegionLink | None = None

    # Hooks that start the storage, called in the scheduler's thread.

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool is not self.mem_pool_host:
            self.switch.turn_off(
                f"this model has memory of another kind, {host_pool_name}; allowed: keys and values"
            )

    @guarded(lambda: None)
    def on_host_pools_registered(self) -> None:
        if get_memory().hicache_storage_backend is None:
            self.switch.turn_off("it is attached at run time, behind changes of weights perhaps")
            return
        _before_weights_change(self.switch.turn_off)
        # A thread of its own, since reading the files of a large model takes a while.
        threading.Thread(target=self._start, name="kvrs-start", daemon=True).start()

    def _start(self) -> None:
        try:
            self._link, self._pages = self._begun(_options(self._config.extra_config))
        except Exception as error:
            self.switch.turn_off(f"{type(error).__name__}: {error}")
        else:
            log.info("kvrs keeps up to %d pages of this server", self._pages.region.rows)
            # An error has turned the backend off while this thread read files.
            if self.switch.off_reason is not None:
                self._let_go()

    def _begun(self, options: _Options) -> tuple[RegionLink, Pages]:
        """Make the shared memory and the link to the own node's agent. Raises KvrsError, OSError:
        pages of this server cannot be shared.
        """
        arguments, pool = get_server_args(), self.mem_pool_host
        place = EnginePlace(options.config, options.instance)
        fields = space.fields_of(sglang.__version__, arguments, self._config, pool)
        page = pool.get_dummy_flat_data_page()
        row_bytes = page.numel() * page.element_size()
        most = free_bytes()
        if not row_bytes <= options.region_bytes <= most:
            raise ConfigError(
                f"region_bytes: got {options.region_bytes}; allowed: {row_bytes} to {most}, what "
                f"is free"
            )
        region = PageRegion(options.region_bytes // row_bytes, row_bytes)
        info = RegionInfo(
            place.instance,
            namespace_of(fields),
            region.rows,
            row_bytes,
            fields | {HOLDS_ABORTED: _holds_aborted()},
            str(arguments.served_model_name),
            pool.page_size,
        )
        own, others = place.clients(info.space)
        agents = [own, *[*others.values()][:MAX_ASKED]]
        link = place.link(info, region.memory, region.ledger, options.lookup_s)
        link.start()
        # Pages of other types, such as fp8 stored as bytes, are not compared.
        proofs = RowProofs(pool.dtype if pool.dtype.is_floating_point else None)
        return link, Pages(region, agents, proofs, options.lookup_s, options.load_s)

    def _let_go(self) -> None:
        if (pages := self._pages) is not None:
            pages.region.close()

    # Hooks that HiCache's threads call.

    @guarded(int)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return 0 if self._pages is None else self._pages.count(_at_agents(keys))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Keep pages in the shared memory. The answer is True for pages that are not kept too,
        because SGLang would log each failure.
        """
        self._store(keys, lambda at: self._page(host_indices, at))
        return [True] * len(keys)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        count = self._load(keys, partial(self._set_page, host_indices))
        return [at < count for at in range(len(keys))]

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        self._store(keys, lambda at: values[at])
        return True

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        def use(at: int, row: memoryview) -> None:
            _numbers(target_locations[at]).copy_(torch.frombuffer(row, dtype=torch.uint8))

        count = self._load(keys, use)
        return [target_locations[at] if at < count else None for at in range(len(keys))]

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    # Hooks for models with other kinds of state beside KV, of which nothing is kept.

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        return PoolTransferResult.empty()

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: [False] * len(each.keys or ()) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: [True] * len(each.keys or ()) for each in transfers}

    # Hooks that any thread may call.

    @guarded(lambda: None)
    def clear(self) -> None:
        """Forget all pages, as at a flush of SGLang's cache."""
        if self._pages is not None:
            self._pages.region.clear()

    def close(self) -> None:
        """Close the storage when SGLang ends. The node's agent keeps the pages for other
        servers.
        """
        pages, self._pages = self._pages, None
        if self._link is not None:
            self._link.close()
        if pages is not None:
            pages.close()

    @guarded(lambda: None)
    def _store(self, keys: Sequence[str], page: Callable[[int], Any]) -> None:
        if self._pages is None:
            return
        self._prove(self._pages, keys, page)
        for at, key in enumerate(_at_agents(keys)):

            def fill(row: memoryview, at: int = at) -> None:
                torch.frombuffer(row, dtype=torch.uint8).copy_(_numbers(page(at)))

            self._pages.region.put(key, fill)

    def _prove(self, pages: Pages, keys: Sequence[str], page: Callable[[int], Any]) -> None:
        """Compare the page that was left out with an agent's, if it is among the pages that were
        computed now.
        """
        if (due := pages.proofs.due(_at_agents(keys))) is None:
            return
        at, theirs = due
        ours = bytearray(len(theirs))
        torch.frombuffer(ours, dtype=torch.uint8).copy_(_numbers(page(at)))
        if pages.proofs.differ(ours, theirs):
            self.switch.turn_off("a page of an agent is not what this server computes")

    @guarded(int)
    def _load(self, keys: Sequence[str], use: Callable[[int, memoryview], None]) -> int:
        if self._pages is None:
            return 0
        found = self._pages.load(_at_agents(keys), use)
        log.info(
            "kvrs loaded %d of %d pages, %d of them from agents",
            found.pages,
            len(keys),
            found.agents,
        )
        return found.pages

    def _page(self, host_indices: Any, at: int) -> Any:
        pool = self.mem_pool_host
        return pool.get_data_page(int(host_indices[at * pool.page_size]))

    def _set_page(self, host_indices: Any, at: int, row: memoryview) -> None:
        pool = self.mem_pool_host
        page = torch.frombuffer(row, dtype=pool.dtype)
        pool.set_from_flat_data_page(int(host_indices[at * pool.page_size]), page)


def _at_agents(keys: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]


def _numbers(page: Any) -> Any:
    """Return the bytes of a tensor in the order of its memory."""
    return page.reshape(-1).view(torch.uint8)


def _options(given: Any) -> _Options:
    """Decode kvrs's options. Raises ConfigError: an option is wrong."""
    try:
        return msgspec.convert(given, _Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"hicache-storage-backend-extra-config: got {given!r:.200}; allowed: config (the "
            f"cluster's YAML), instance (an id in it), region_bytes, and if wanted lookup_s and "
            f"load_s ({error})"
        ) from None


def _before_weights_change(turn_off: Callable[[str], None]) -> None:
    """Make SGLang call `turn_off` before it changes weights: a page's key does not tell which
    weights computed it.

    Raises:
        KvrsError: this SGLang lacks the expected methods.
    """
    names = [name for name in dir(WeightUpdater) if name.startswith(_CHANGES_OF_WEIGHTS)]
    if "update_weights_from_disk" not in names:
        raise KvrsError("this SGLang changes weights by other names")

    def noticing(change: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*arguments: Any, **more: Any) -> Any:
            turn_off("its weights change")
            return change(*arguments, **more)

        return noticed

    for name in names:
        setattr(WeightUpdater, name, noticing(getattr(WeightUpdater, name)))
