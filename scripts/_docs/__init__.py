"""The parts of `scripts/docs`: `reference.py` pages made from the code, `site.py` all pages as HTML."""
