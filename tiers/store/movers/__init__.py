"""What moves pages between DRAM and disk: writing behind, and fetching ahead for the queue."""
