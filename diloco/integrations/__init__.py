"""Callbacks for the trainers of other libraries. Each module imports its library, and `diloco`
imports none of them."""
