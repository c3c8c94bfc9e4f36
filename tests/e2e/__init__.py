"""Tests of the promises: real processes, real signals, foreign clients."""
