"""Observing a running server: Prometheus metrics and OpenTelemetry traces. Nothing here changes a request."""
