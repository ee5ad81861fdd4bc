"""Tests of dualeval/process."""
