"""What every benchmark case needs: options and reports, the machine, text, plots, statistics."""
