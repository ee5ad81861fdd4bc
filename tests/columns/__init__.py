"""Tests of dualeval/columns."""
