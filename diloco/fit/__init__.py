"""Fits a run to this machine: measurements, the settings of a volunteer, and the doctor."""
