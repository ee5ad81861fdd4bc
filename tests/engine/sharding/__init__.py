"""Tests of dualeval/engine/sharding."""
