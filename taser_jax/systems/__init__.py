"""What only one of the published systems needs, from model to figures."""
