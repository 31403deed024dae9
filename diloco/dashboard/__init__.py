"""Shows a swarm in the browser: one page, and its figures as JSON and for Prometheus. Needs the extra `dashboard`.

swarm -> Poller (a snapshot per second) -> PageContent (charts and rows, once for all pages) -> a page per visitor
                                        -> GET /api/state, GET /metrics
"""
