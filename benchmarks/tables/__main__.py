"""Check or write the tables: ``python -m benchmarks.tables --write``."""

from benchmarks.tables.pages import main

if __name__ == "__main__":
    main()
