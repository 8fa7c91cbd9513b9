"""Forms of ``apply_emb``, and what a proof of one may not change."""
