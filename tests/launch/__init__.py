"""Tests of starts."""
