"""SeqIO registrations, and running them once into a token store."""
