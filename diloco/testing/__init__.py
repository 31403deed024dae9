"""What tests, `scripts/` and those who extend diloco share: swarms in virtual time, faults, liars,
links, tables.

The product imports nothing of it.
"""
