"""The seeded simulator and its tests."""
