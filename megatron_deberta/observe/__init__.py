"""What a run shows and writes about itself: logs, live view, metrics, throughput."""
