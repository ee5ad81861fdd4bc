"""Tests of dualeval/engine/folder."""
