"""Memory-mapped token arrays and hard negatives. NumPy only."""
