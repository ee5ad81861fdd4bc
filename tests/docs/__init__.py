"""Tests of what is said and shipped: README, docs, examples, packaging, structure."""
