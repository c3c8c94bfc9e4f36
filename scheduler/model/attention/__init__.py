"""Attention backends behind one registry; each is imported when it is chosen."""
