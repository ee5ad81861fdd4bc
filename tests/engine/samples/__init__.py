"""Tests of dualeval/engine/samples."""
