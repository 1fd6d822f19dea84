"""Studies: the same training many times, with one thing changed, and a table and a plot of what comes out."""
