"""Durable units of work on any ``concurrent.futures.Executor``, in a folder that survives kills."""
