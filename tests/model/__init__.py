"""Tests of scheduler.model."""
