"""Turns a configuration and a token store into a program; reads and writes model directories."""
