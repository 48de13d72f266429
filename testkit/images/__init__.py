"""Models that see images, and pictures to show them."""
