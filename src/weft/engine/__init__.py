"""Runs requests: the loop (plan, run, commit), the executors, sampling, structured output, calibration."""
