"""The simulator: the scheduler that serves, under a virtual clock, on traces and invented traffic."""
