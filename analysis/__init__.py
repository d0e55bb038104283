"""Records, metrics and comparisons: reads what runs left behind, never a live engine."""
