"""Serves a retriever over HTTP: search, embeddings, metrics and a search page."""
