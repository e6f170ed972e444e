"""Training loop: data, steps, metrics, validation, checkpoints, rollbacks.

In reading order: ``run`` (assembles a run), ``start`` (where it starts), ``trainer`` (the loop and
its ``Callback``), ``step`` (one optimizer step), ``callbacks`` (metrics, validation, saves),
``records`` (what rank 0 writes), ``preemption`` (signals), ``stability`` (skips, rollbacks, second
runs, replicas).
"""
