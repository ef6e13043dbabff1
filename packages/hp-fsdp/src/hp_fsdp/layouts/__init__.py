"""How the parameters of one group lie in flat memory; each layout is one module."""
