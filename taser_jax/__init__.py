"""Train, mine for, evaluate and serve dense retrievers that specialise by task."""

__version__ = "0.1.0"
