"""Tests of the world of ranks."""
