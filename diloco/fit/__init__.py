"""What fits this machine: measurements, settings of a volunteer, the doctor."""
