"""A swarm in the browser: one page, its figures as JSON, and the same for Prometheus. Needs the extra `dashboard`."""
