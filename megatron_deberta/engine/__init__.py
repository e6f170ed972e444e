"""Turning losses into updates: the engines, the optimizer, the schedule, the loss scale."""
