"""The run directory: what a run writes, and how it is read, summarised, plotted and compared."""
