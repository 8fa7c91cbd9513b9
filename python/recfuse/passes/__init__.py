"""``swap`` and ``unswap`` put recfuse's operators into models and take them out; each pattern has a file."""
