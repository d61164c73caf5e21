"""Benchmarks: speed is measured here, never in tests."""
