"""A whole DLRM with torch's tables and with recfuse's. See README.md."""
