"""Files that survive: artefacts, checksums, locks, typed JSON, errors, records, progress."""
