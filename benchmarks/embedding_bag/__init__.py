"""One large table: recfuse.nn.EmbeddingBag, torch's and FBGEMM's. See README.md."""
