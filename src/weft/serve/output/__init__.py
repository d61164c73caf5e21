"""The output of a request before it gets a format: text, reasoning, tool calls, token offsets."""
