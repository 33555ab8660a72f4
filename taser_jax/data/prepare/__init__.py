"""Foreign records to collections: merging, splits, questions."""
