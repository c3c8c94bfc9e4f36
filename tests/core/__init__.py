"""Tests of scheduler.core."""
