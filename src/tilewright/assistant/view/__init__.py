"""A report to look at: a page with plots, and tables in a terminal."""
