"""Collectives over a mesh axis.

`Collectives` is the protocol, and `TorchCollectives` the default implementation. hp-dtensor and the
packages built on it communicate through objects of this protocol.
"""
