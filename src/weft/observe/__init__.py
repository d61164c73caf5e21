"""What people see of a running server: Prometheus metrics and OpenTelemetry traces. Nothing here changes a request."""
