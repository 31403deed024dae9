"""Requests between peers: the asking and the answering side of each are in one module."""
