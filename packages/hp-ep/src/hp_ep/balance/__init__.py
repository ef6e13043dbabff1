"""Gradient norms in which a replica counts once."""
