"""Vocabularies, preprocessors and prompts."""
