"""Tests of dualeval/engine/end."""
