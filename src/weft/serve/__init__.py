"""The server: an API process (HTTP, text, streaming) and an engine process (the loop), with messages between them."""
