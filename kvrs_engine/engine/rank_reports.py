"""The part of an instance's load reports about its ranks and its loans."""

import time
from collections.abc import Sequence
from typing import Any

from kvrs.ids import NodeId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import ExpertReport, ReformingReport, StageInfo
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.core import EngineCore
from kvrs_engine.engine.page_port import PagePort
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.reformed import ReformingNow
from kvrs_engine.engine.ranks.returning import StageLoan
from kvrs_engine.engine.ring import StageRing
from kvrs_engine.engine.stage_loans import StageLoans


def loans_of(ranks: RankGroup | RanksOnNodes) -> dict[int, StageLoan]:
    """Return the loans that the instance has from other instances, by stage."""
    return ranks.loans if isinstance(ranks, RanksOnNodes) else {}


class RankReports:
    def __init__(
        self,
        ranks: RankGroup | RanksOnNodes,
        nodes: Sequence[NodeId],
        epoch: int,
        prefill: PrefillTable,
        core: EngineCore,
        port: PagePort,
        loans: StageLoans | None,
        ring: StageRing | None,
    ) -> None:
        """`nodes` has each stage's node, for stages that are not borrowed."""
        self._ranks, self._nodes, self._epoch, self._prefill = ranks, nodes, epoch, prefill
        self._core, self._port, self._loans, self._ring = core, port, loans, ring
        # The number of a layout, and its step times relative to the full layout.
        self._factors: tuple[int, tuple[float, float]] | None = None

    def facts(self) -> dict[str, Any]:
        """Return fields of `LoadReport`."""
        ranks, loans = self._ranks.now, self._loans
        layout = ranks.layout
        facts: dict[str, Any] = {
            "layout_number": layout.number + (0 if loans is None else loans.changes),
            "full_degree": len(self._ranks.full.ranks),
        }
        if self._factors is None or self._factors[0] != layout.number:
            self._factors = layout.number, self._ranks.factors(layout)
            self._core.step_times.prefill_factor = self._factors[1][1]
        facts["decode_factor"], facts["prefill_factor"] = self._factors[1]
        facts["experts"] = self._experts(layout)
        facts |= {"rank_deaths": ranks.deaths, "stages": self._stages()}
        if loans is not None:
            restarts, facts["lends"] = loans.restarts, loans.lends
            facts["restarts"] = restarts.recent.reports()
            facts["adopted_pages"] = restarts.adopted_pages
        now = ranks.reforming
        # If nothing is lost the ranks compute on, and no stream needs a decision.
        if now is None or not now.way.pauses:
            return facts | {"degree": len(layout.ranks)}
        core = self._core
        decode, prefill = self._ranks.factors(now.after)
        page_s = self._prefill.page_s(core.pages.page_size_tokens) * prefill
        report = ReformingReport(
            number=now.number,
            way=now.way,
            ready_in_s=max(0.0, now.ready_at_s - time.monotonic()),
            degree=len(now.after.ranks),
            lost=list(now.lost),
            move_bytes=now.move_bytes,
            missing_pages=core.missing_pages if now.lost_cells else {},
            page_s=page_s,
            decode_factor=decode,
            prefill_factor=prefill,
            **self._returning_pages(now, page_s),
        )
        return facts | {"degree": report.degree, "reforming": report}

    def _returning_pages(self, now: ReformingNow, page_s: float) -> dict[str, Any]:
        """Return the fields about pages whose lost cells are fetched, not computed."""
        if not now.lost_cells:
            return {}
        if now.way is Way.SUBSTITUTE:  # The pages come with the loan.
            return {"held_pages": self._core.replicated_pages}
        held_page_s = self._fetch_s(now.lost_cells) or page_s
        return {"held_pages": self._core.held_pages, "held_page_s": held_page_s}

    def _experts(self, layout: Layout) -> ExpertReport | None:
        """Return the report on the experts of the local stages; hosts balance their own."""
        ranks = self._ranks
        groups = ranks.groups if isinstance(ranks, RanksOnNodes) else [ranks]
        for group in groups:
            if isinstance(group, RankGroup) and (loads := group.reformer.loads) is not None:
                return loads.facts(layout)
        return None

    def _stages(self) -> list[StageInfo]:
        nodes, loans = self._nodes, loans_of(self._ranks)
        return [
            StageInfo(
                stage=stage,
                node=nodes[stage] if (loan := loans.get(stage)) is None else loan.node,
                host_pid=use.host_pid,
                session=use.session,
                epoch=self._epoch,
                worked_s=use.worked_s,
                read_bytes=use.read_bytes,
                donor=None if loan is None else loan.lender,
                pages=None if loan is None else len(loan.pages),
                **({} if self._ring is None else self._ring.facts_of(stage)),
            )
            for stage, use in sorted(self._ranks.use().items())
        ]

    def _fetch_s(self, cells: int) -> float:
        """Return the time to fetch `cells` cells of a page from an agent; 0: not known."""
        geometry = self._ranks.geometry
        rate = self._port.agents_bytes_per_s()
        return geometry.page_bytes * cells / geometry.page_cells / rate if rate else 0.0
