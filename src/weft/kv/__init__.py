"""The KV cache: its layout (spec.py) and its memory on one device (pool.py, which imports torch)."""
