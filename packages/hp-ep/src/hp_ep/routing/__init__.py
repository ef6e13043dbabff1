"""Which experts a token goes to, and what keeps their loads even."""
