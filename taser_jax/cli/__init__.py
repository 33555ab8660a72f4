"""The command line, Gin files and settings."""
