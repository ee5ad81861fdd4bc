"""Data sets: images in folders and in idx files."""
