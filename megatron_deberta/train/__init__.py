"""Training loop: data, steps, metrics, validation, checkpoints, rollbacks.

In reading order: ``run`` (assembles a run, with ``setup``, ``data`` and ``summary``), ``start``
(where it starts), ``trainer`` (the loop and its ``Callback``), ``state`` (position, result of a
step, ending), ``prefetch`` (batches on the device), ``step`` (one optimizer step), ``callbacks``
(metrics, validation, saves) and ``local_checkpoints``, ``records`` (what rank 0 writes),
``preemption`` (signals), ``stability`` (skips, rollbacks, second runs, replicas).
"""
