"""Arguments of every command; `common.py` has the way from there to the module that does the work."""
