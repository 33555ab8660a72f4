"""Retrieval tasks: registered without SeqIO or with it, and tokenised into a token store."""
