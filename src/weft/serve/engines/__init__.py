"""Engine processes: their start, their supervision, and the messages to and from them.

engine_main.py runs in the engine process. Both sides use messages.py and heartbeat.py. All other modules run in the API
process.
"""
