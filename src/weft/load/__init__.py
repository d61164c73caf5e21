"""Load tests: send requests to any OpenAI-compatible server as many users would, and report what the users see."""
