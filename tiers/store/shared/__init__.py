"""What moves pages between DRAM and a store that servers share: asking, fetching, sending."""
