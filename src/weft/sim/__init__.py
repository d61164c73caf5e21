"""The simulator: runs the real scheduler under a virtual clock, on traces and synthetic traffic."""
