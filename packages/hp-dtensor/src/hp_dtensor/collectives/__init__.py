"""Collectives over a mesh axis. All packages communicate through these classes."""
