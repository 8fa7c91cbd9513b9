"""Costs of tables on ranks, and the search for the ranks: for ``recfuse place`` and for plans of sharding."""
