"""Training steps: torch and recfuse. See README.md."""
