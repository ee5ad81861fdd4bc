"""Tests of dualeval/engine/device."""
