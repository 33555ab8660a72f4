"""Turns records into collections: merging, splits, questions."""
