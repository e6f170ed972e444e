"""Comparisons with code by other authors, and the rows of the table of what they found."""
