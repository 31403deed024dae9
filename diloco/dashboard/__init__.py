"""A swarm's state in a browser and in a terminal.

swarm -> Dashboard.watch (a snapshot per second) -> /api/state, which page.html polls; /metrics
"""
