"""DiLoCo attached to any torch training loop: what `Swarm` and the integrations are made of."""
