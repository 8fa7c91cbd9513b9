"""One large table: recfuse.nn.EmbeddingBag against torch's and FBGEMM's, on five kinds of access.

The setting of Jain et al. (MICRO'24): 500,000 rows of fp32, batch 2048 x 150 lookups, sum pooling, int64
indices; hotness from one row for all lookups to random rows. Candidates run in turns on the same batches
with the same number of threads. FBGEMM's CPU modules run on one thread by their nature; each is also run
with the bags dealt out by us to as many threads, and the fastest of these is the peer "FBGEMM".

With --device cuda: the paper's figures, and a table of torch (eager and compiled), FBGEMM and recfuse on many
tables in turn, beside the ceilings of the GPU at hand.

All outputs are compared first. Inference mode throughout. Each candidate has a table of its own, on the
pages that it asks the system for: recfuse on huge ones, torch and FBGEMM on what malloc gives (all on huge
ones with GLIBC_TUNABLES=glibc.malloc.hugetlb=1).
"""

from common.registry import Benchmark

MODULES = ["flags", "cpu", "random_rows", "main_table", "sweeps", "schemes", "short_bags", "parts"]
bench = Benchmark("embedding_bag", __doc__, MODULES, rounds=21, quick_rounds=5, plots="figure")
