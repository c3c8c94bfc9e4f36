"""Tests mirror the packages; tests/e2e runs the real server and imports nothing of the product."""
