"""Tests of dualeval/engine/checks."""
