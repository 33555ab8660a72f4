"""Passages and queries on disk, with random access by row."""
