"""weft serves language models so that nobody's stream stutters when somebody else's long prompt arrives."""

__version__ = "0.1.0"
