"""The parts of `scripts/attacks`: honest swarms in virtual time, one attacker among them, and what came of it."""
