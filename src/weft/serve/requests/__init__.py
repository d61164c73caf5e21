"""Checks request bodies and turns them into ParsedRequests."""
