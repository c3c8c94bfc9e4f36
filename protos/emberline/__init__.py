"""Emberline: a gRPC service that streams tokens from a language model. What callers install."""
