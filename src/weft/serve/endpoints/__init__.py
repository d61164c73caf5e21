"""Handlers of the HTTP paths."""
