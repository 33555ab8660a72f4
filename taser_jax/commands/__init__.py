"""One module per `taser` command: each turns its arguments into artefacts."""
