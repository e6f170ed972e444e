"""The on-disk format of a run's state, saving and loading it, and other libraries' formats.

Owns what is in docs/checkpoint-format.md and the names Hugging Face and Microsoft use. Refuses to
decide when to save: the loop does.
"""
