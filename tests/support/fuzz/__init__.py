"""Files for `tests/tools/fuzz_readers.py`: the forms that recfuse reads, and their mutations."""
