"""Shows a swarm in the browser: a page without libraries, and its figures as JSON and for
Prometheus.

swarm -> Dashboard.watch (a snapshot per second) -> GET /api/state -> page.html, once a second in
each browser
                                                 -> GET /metrics
"""
