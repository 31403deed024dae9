"""The protocol, sans-IO: what happens to the histories of the fragments. `README.md` tells it on
one page."""
