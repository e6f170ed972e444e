"""Text files to indexed shards.

Owns reading, decompressing and parsing text, the worker processes, and what a user sees of them.
Refuses to define the shards' format (``data``) and the ids (``tokenizer``).
"""
