"""Measures any OpenAI-compatible server from outside, over HTTP, as its users see it."""
