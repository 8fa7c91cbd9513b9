"""Graph passes: plain models as they are, under torch.compile and after the pass, and written by hand."""
