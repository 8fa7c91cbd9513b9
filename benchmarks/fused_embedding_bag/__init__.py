"""Many heterogeneous tables: recfuse.nn.FusedEmbeddingBagCollection and its peers. See README.md."""
