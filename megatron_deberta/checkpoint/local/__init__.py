"""Checkpoints on the nodes' own disks, with replicas on neighbour nodes."""
