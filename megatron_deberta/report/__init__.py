"""HTML report of one run, or of several compared."""
