"""Tests of dualeval/engine/control."""
