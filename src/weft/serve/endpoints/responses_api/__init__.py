"""/v1/responses: its endpoints, the store of responses, conversations, and responses in the background."""
