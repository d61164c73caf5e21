"""Engine processes: their start, their supervision, and the messages to and from them."""
