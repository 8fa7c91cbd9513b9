"""Files for `tests/readers/fuzz_readers.py`: the forms that recfuse reads, and their mutations."""
