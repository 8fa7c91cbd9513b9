"""Parts of calls of tables that a fused optimizer updates."""
