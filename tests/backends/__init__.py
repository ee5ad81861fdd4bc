"""Tests of dualeval/backends."""
