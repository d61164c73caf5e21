"""The server: an API process (HTTP, text, streaming) and an engine process (the loop), with messages between them.

One request has one name at each stop: a body (protocols), ParsedRequest (requests), AddPrompt (engines), Stream (in
the engine process), SequenceUpdate and RequestOutputCollector (engines, in the API process), Choice and ChoiceDelta
(output), chunks (protocols).
"""
