"""Tests of dualeval/engine/job."""
