"""Tests of dualeval/training."""
