"""A configuration and a token store to a program; the model directory."""
