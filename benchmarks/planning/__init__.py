"""Dry runs of real ranks, which the plan's counts are compared with."""
