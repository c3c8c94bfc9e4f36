"""Tests of emberline.client and the commands built on it."""
