"""Everything public is used once as its documentation shows it, with its defaults, and what it prints is looked at."""
