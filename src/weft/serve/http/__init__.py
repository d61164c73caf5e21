"""HTTP without endpoints: connections, API keys, limits, CORS and JSON bodies."""
