"""Request bodies and answer formats of the APIs: OpenAI, Anthropic, embeddings."""
