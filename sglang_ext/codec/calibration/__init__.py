"""Calibration: from a model and text to a profile, and where profiles lie."""
