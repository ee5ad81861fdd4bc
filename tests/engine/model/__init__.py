"""Tests of dualeval/engine/model."""
