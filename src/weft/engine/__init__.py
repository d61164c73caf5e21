"""Runs requests: the loop (plan, run, commit), the executor behind it, batches as tensors, sampling."""
