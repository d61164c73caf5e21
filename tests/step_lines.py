"""A planned step as one readable line."""

from weft.core import PlannedStep


def line_of(step: PlannedStep) -> str:
    """The rows of a step, such as "a:5+1* b:0+16": request:first+count, * if a token is sampled after the row."""
    batch = step.batch
    rows = zip(step.requests, batch.first.tolist(), batch.count.tolist(), batch.is_sampled.tolist(), strict=True)
    return " ".join(f"{request.id}:{first}+{count}{'*' * sampled}" for request, first, count, sampled in rows)
