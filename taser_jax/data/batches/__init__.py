"""The rows of a step as a function of seed and step. NumPy only."""
