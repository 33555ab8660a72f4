"""Which parameters serve which task."""
