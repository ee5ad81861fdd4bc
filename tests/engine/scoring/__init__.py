"""Tests of dualeval/engine/scoring."""
