"""What tests and `scripts/` share: swarms in virtual time, faults, liars, links, tables.

None of it is installed.
"""
