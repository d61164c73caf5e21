"""Attention backends behind one interface, and kernels for layers and sampling. They know no requests or scheduling."""
