"""Forms of ``apply_emb``, and the state that a proof must not change."""
