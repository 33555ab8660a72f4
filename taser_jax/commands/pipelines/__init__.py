"""Stages composed into resumable runs."""
