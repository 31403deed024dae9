"""Requests of outsiders to a swarm, without being members."""
