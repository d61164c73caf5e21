"""Load: asks any OpenAI-compatible server for answers, as many users would, and tells what they saw."""
