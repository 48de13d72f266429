"""Faults under the page store itself, without a server: kills, power cuts, damage, bad networks."""
