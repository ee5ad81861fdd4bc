"""Tests of dualeval/cluster."""
