"""Collectives over a mesh axis.

`Collectives` is the protocol, and `TorchCollectives` is the default implementation. hp-dtensor, and
the packages built on it, communicate through objects that satisfy the protocol.
"""
