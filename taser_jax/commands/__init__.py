"""One module per taser command: arguments in, artefacts out."""
