"""Support for calls of tables that a fused optimizer updates."""
