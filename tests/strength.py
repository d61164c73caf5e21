"""How many examples a property test draws: all of them in the long run (`make test-long`), a part of them otherwise."""

from hypothesis import settings

QUICK_PART = 5  # the default run draws one example in so many


def is_long() -> bool:
    return settings.get_current_profile_name() == "long"


def examples(full: int) -> int:
    """The number of examples for a test that draws `full` in the long run."""
    return full if is_long() else min(full, max(5, full // QUICK_PART))
