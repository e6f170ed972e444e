"""Tables of README and docs."""
