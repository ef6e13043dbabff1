"""A plan as a JSON document."""

from collections.abc import Iterable, Mapping

from ..planner import Candidate, Plan
from ._choice import choose
from ._documents import dims_document
from ._reasons import memory_parts, time_parts
from ._rejections import RejectionGroup


def plan_document(
    found: Plan, top: Iterable[Candidate], rejections: Iterable[RejectionGroup]
) -> Mapping[str, object]:
    """Return the counts, what to run, the best candidates and the rejections by rule.

    Memory is in bytes, time in seconds.
    """
    chosen = choose(found)
    return {
        "model": found.model.name,
        "world_size": found.cluster.world_size,
        "accelerator": found.cluster.device.name,
        "counts": {
            "considered": found.considered,
            "fits": len(found.fits),
            "borderline": len(found.borderline),
            "does not fit": len(found.too_large),
            "rejected": len(found.rejected),
        },
        "recommended": None if chosen is None else candidate_document(chosen),
        "candidates": [candidate_document(candidate) for candidate in top],
        "rejected": [
            {
                "rule": group.rule,
                "count": group.count,
                "example": {"degrees": dict(group.example.degrees), "text": str(group.violation)},
            }
            for group in rejections
        ],
    }


def candidate_document(candidate: Candidate) -> Mapping[str, object]:
    """Return a candidate with its splits and rates."""
    return {
        "dims": dims_document(candidate.dims),
        "micro_batch": candidate.micro_batch,
        "microbatches": candidate.microbatches,
        "recompute": candidate.recompute,
        "fit": candidate.fit,
        "memory": {**memory_parts(candidate), "total": candidate.memory.total},
        "limit": candidate.limit,
        "time": {**time_parts(candidate), "total": candidate.time.total},
        "tokens_per_second_per_gpu": candidate.tokens_per_second_per_gpu,
        "mfu": candidate.mfu,
    }
