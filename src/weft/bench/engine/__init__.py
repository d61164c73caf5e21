"""Measures an engine from inside, in the same process."""
