"""A disk tier's folder without its tier: what lies there, whether it is sound, and its removal."""
