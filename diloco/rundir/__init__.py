"""The run directory: writes the files of a run, and reads, summarises, plots and compares them."""
