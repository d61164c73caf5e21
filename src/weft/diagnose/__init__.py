"""Which phase of a server hurts, the numbers that say so, and what to change."""
