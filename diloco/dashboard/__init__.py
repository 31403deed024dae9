"""A swarm's state in a browser and in a terminal.

swarm -> Dashboard.watch (a snapshot per second) -> tables -> /api/page, which page.html polls
                                                 -> /api/state, /metrics
"""
