"""Attention backends behind one interface. They know nothing of requests or scheduling."""
