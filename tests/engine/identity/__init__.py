"""Tests of dualeval/engine/identity."""
