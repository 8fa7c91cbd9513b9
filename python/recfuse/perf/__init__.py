"""What calls cost on a GPU: the launches of a call, without running it."""
