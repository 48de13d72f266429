"""What was said of pages, and how often who said it was right."""
