"""The rules of the protocol, as functions on what a peer knows; each changes its own part of it."""
