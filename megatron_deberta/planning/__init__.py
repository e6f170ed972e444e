"""What a run costs before it runs: memory, work, traffic, time; and the layout that costs least.

Owns predictions by formula, for any number of ranks, without a device. Refuses to measure:
``benchmarks/planning/compare.py`` compares the counts with dry runs of real ranks.
"""
