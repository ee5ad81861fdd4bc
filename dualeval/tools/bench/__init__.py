"""Measuring: cells of mode, processes, precision and batch size, their figures, tables and plots."""
