"""The worth of a draft model while an instance loads again: the states of its start, and the
steps of the instance that it helps, by published tables.
"""

from dataclasses import dataclass
from typing import Any

from kvrs.profiles import catalog
from kvrs_engine.elastic.assistance import assistance, reload_times


@dataclass(frozen=True, slots=True)
class DraftQuestion:
    """`profile`, `draft`: names of the catalog, of the model and of the small one."""

    profile: str
    draft: str
    acceptance: float  # Probability that a draft is what the model chooses.
    depth: int
    batch: int  # Streams of the instance that is helped.
    context_tokens: int  # Of each.
    disk_bytes_per_s: float


def explain_drafts(question: DraftQuestion) -> dict[str, Any]:
    """The answer as JSON has it.

    Raises:
        ConfigError: there is no such profile, or it has no decode table or load time.
    """
    model, draft = (catalog.load(name) for name in (question.profile, question.draft))
    step, draft_step = (catalog.decode_table(name) for name in (question.profile, question.draft))
    context = question.batch * question.context_tokens
    times = reload_times(
        draft.weight_bytes,
        model.weight_bytes,
        question.disk_bytes_per_s,
        catalog.load_s(question.draft),
        catalog.load_s(question.profile),
    )
    helped = assistance(
        lambda rows: step.seconds_for(rows, context),
        lambda rows: draft_step.seconds_for(rows, context),
        question.batch,
        question.acceptance,
        question.depth,
    )
    without_s = model.weight_bytes / question.disk_bytes_per_s + times.hotswap_s
    return {
        "is_worth_it": times.is_worth_it and helped.gain > 1,
        "loading_draft_s": times.loading_draft_s,
        "assist_s": times.assist_s,
        "hotswap_s": times.hotswap_s,
        "full_service_s": times.full_service_s,
        "full_service_without_draft_s": without_s,
        "step_s": helped.step_s,
        "verified_step_s": helped.verified_step_s,
        "draft_s": helped.draft_s,
        "drafts_a_step": helped.drafts,
        "accepted_a_step": helped.accepted_tokens,
        "tokens_per_s": question.batch / helped.step_s,
        "tokens_per_s_with_drafts": question.batch / helped.step_s * helped.gain,
        "gain": helped.gain,
    }
